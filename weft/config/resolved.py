"""The resolved configuration: sections plus all derived values, frozen."""

from __future__ import annotations

import msgspec

from weft.config.cache_layout import TensorLayout, pool_tensors, slot_tensors
from weft.config.sections.all import (
    CacheSection,
    Config,
    GrammarSection,
    MediaSection,
    ModelSection,
    ParallelSection,
    RunnerSection,
    SchedulerSection,
    SpeculationSection,
    TransferSection,
)
from weft.config.sections.events_section import EventsSection
from weft.config.sections.lora_section import LoraSection
from weft.config.sections.tier_section import TierSection
from weft.config.spec import CacheSpec, ModelSpec
from weft.types.faults import Fault
from weft.types.media_item import BLOCK_ROWS


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Pool of one KV cache group: the group's spec and the number of blocks, without the null block."""

    cache: CacheSpec
    block_size: int
    """Positions per block. State groups: snapshots are made at multiples of ``block_size``."""
    num_blocks: int
    stride: int = 0
    """State groups: positions between two snapshots of a long prompt; 0 for as many snapshots as possible."""

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of all blocks in a model of ``dtype``, with the null block."""
        return sum(tensor.nbytes for tensor in self.tensors(dtype))

    def tensors(self, dtype: str) -> tuple[TensorLayout, ...]:
        """Return the layouts of the tensors that hold the blocks in a model of ``dtype``."""
        return pool_tensors(self.cache, self.block_size, self.num_blocks, dtype)

    def describe(self, dtype: str) -> str:
        """Return text for the log: ``512 blocks of 64 (full, 18.9 MB in fp8)``."""
        form = "fp8" if self.cache.fp8 else dtype
        size = self.nbytes(dtype) / 1e6
        return f"{self.num_blocks} blocks of {self.block_size} ({self.cache.kind}, {size:.1f} MB in {form})"


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties and limits of a model's images, for the scheduler and the ranks."""

    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Side of a token in patches."""
    frames: int = 1
    """Maximum number of pixel frames per frame group of a grid, or of frames of a grid if ``averaged``."""
    averaged: bool = False
    """True if a grid counts pixel frames, and the tower averages the frames of an item."""
    row_bytes: int
    """Bytes of one embedding row on a rank, with the rows of all levels."""
    cache_bytes: int
    """Bytes of a rank's embedding cache."""
    encode_patches: int
    """Maximum number of patches that a step encodes. A larger image is encoded alone."""
    most_items: int
    """Maximum number of images per prompt."""
    sections: bool = False
    """True if rope positions have frame, row and column."""
    tower: bool = True
    """True if the group encodes images. Otherwise embeddings arrive by transfer."""
    takes: bool = False
    """True if embeddings may arrive by transfer."""
    shards: bool = False
    """True if each rank receives a share of the rows, and the ranks exchange rows."""
    host_bytes: int = 0
    """Bytes of the second cache tier: a rank's host memory for embeddings evicted from the first tier."""
    encode_items: int = 32
    """Maximum number of images per step of an encode group."""
    levels: int = 0
    """Additional rows per token (deepstack), besides the row in place of the token's embedding."""
    width: int = 0
    """Elements per row and level."""
    block_rows: int = BLOCK_ROWS
    """Rows per block of the pool."""
    gaps: bool = False
    """True if a token of text follows each row of an image; see ``MediaFacts.row_end``."""
    whole: int = 0
    """Maximum tokens of an image, if one step must compute all tokens of an image; 0: a chunk may cut."""
    ahead: tuple[int, ...] = ()
    """KV cache groups with tokens of an image that attend to later tokens of the image."""

    def tokens_of(self, grid: tuple[int, int, int]) -> int:
        """Return the number of tokens of an image of ``grid`` patches."""
        frames, rows, columns = grid
        if self.averaged:
            frames = 1
        lines = rows // self.merge if self.gaps else 0
        return frames * rows * columns // self.merge**2 + lines

    def binding(self, grid: tuple[int, int, int]) -> tuple[int, bool]:
        """Return ``columns`` and ``whole`` of ``BindMedia`` of an image of ``grid`` patches."""
        return grid[2] // self.merge if self.gaps else 0, self.whole > 0

    @property
    def blocks(self) -> int:
        """Blocks in the embedding pool, without the null block; 0 if the group keeps no embeddings."""
        return self._holds(self.cache_bytes) if self.tower or self.takes else 0

    @property
    def host_blocks(self) -> int:
        """Blocks in the second tier."""
        return self._holds(self.host_bytes) if self.tower or self.takes else 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of a rank's pool in device memory."""
        return (1 + self.blocks) * self.block_rows * self.row_bytes if self.blocks else 0

    def describe(self) -> str:
        """Return text for the log: ``83 blocks of 64 rows (embeddings, 536.9 MB)``."""
        return f"{self.blocks} blocks of {self.block_rows} rows (embeddings, {self.pool_bytes / 1e6:.1f} MB)"

    def blocks_of(self, count: int) -> int:
        """Return the number of blocks for an embedding of ``count`` rows."""
        return -(-count // self.block_rows)

    def _holds(self, nbytes: int) -> int:
        """Return the number of blocks in ``nbytes``."""
        return nbytes // (self.block_rows * self.row_bytes)


class KVConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of ``kv`` and ``scheduler``, without files or devices."""

    pools: tuple[PoolSpec, ...]
    block_size: int
    """Positions per base block, the unit of prefix hashes."""
    enable_prefix_caching: bool
    max_model_len: int
    num_slots: int
    """Slots in the table: running sequences, and sequences before the commit of the last step."""
    copies: int = 1
    """Copies of the recurrent state per slot: 1, plus 1 per draft that a step may verify."""
    media: MediaLimits | None = None
    """Image properties; None for a model without images."""

    def tensors(self, pool: PoolSpec, dtype: str) -> tuple[TensorLayout, ...]:
        """Return the tensor layouts that layers use for a KV cache group: blocks, or states of slots."""
        if pool.cache.kind == "state":
            return slot_tensors(pool.cache, self.num_slots, self.copies, dtype)
        return pool.tensors(dtype)

    @property
    def drafts(self) -> int:
        """Maximum number of drafts per sequence and step."""
        return self.copies - 1


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """Other groups of the server on a group's host. The groups share cores, memory and GPUs."""

    ranks: int = 0
    """Ranks of all groups on the host; 0 for a single group."""
    first: int = 0
    """Ranks of the groups before the group. Earlier ranks take GPUs first."""
    gpus: int = 0
    """GPUs of the host."""
    index: int = 0
    """Number of the host among the hosts of the group; the head is host 0."""
    elsewhere: bool = False
    """True if the group runs on another host, so that memory and devices of this host do not matter."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved configuration of one group. ``model_path`` is a local folder."""

    model_path: str
    tokenizer_path: str
    served_names: tuple[str, ...]
    spec: ModelSpec
    dtype: str
    device: str
    """"cpu" or "cuda"."""
    model: ModelSection
    cache: CacheSection
    scheduler: SchedulerSection
    runner: RunnerSection
    kv: KVConfig
    speculation: SpeculationSection = SpeculationSection()
    parallel: ParallelSection = ParallelSection()
    transfer: TransferSection = TransferSection()
    """Transfer settings, with the group's ``role``."""
    grammar: GrammarSection = GrammarSection()
    media: MediaSection = MediaSection()
    events: EventsSection = EventsSection()
    lora: LoraSection = LoraSection()
    tier: TierSection = TierSection()
    gpus: tuple[str, ...] = ()
    """GPUs of the group on this host, in CUDA_VISIBLE_DEVICES notation.

    Ranks get GPUs in order (see ``gpu_of``).
    """
    replica: int = 0
    """Number of the group among the replicas of the model."""
    faults: tuple[Fault, ...] = ()
    """Faults planted by tests; there is no flag."""
    accepted_names: tuple[str, ...] = ()
    """Further model names for requests, besides ``served_names``; never listed."""
    socket_folder: str = ""
    """Folder of sockets on one host, for ranks and for the rendezvous of an expert-parallel group."""
    rendezvous: str = ""
    """Address of the rendezvous store of a group over several hosts; "" for a group on one host."""
    start_id: int = 0
    """Number that the owner of the engine process gave to the start; see ``EngineIdentity.start``. 0 for
    none."""
    address_file: str = ""
    """File in which the engine process writes the address of its socket; "" for a known address."""
    group: str = ""
    """Name of the group in a server of several groups."""
    base: str = ""
    """Name of the group without its number: ``decode`` for ``decode0``; "" for a group without a name."""
    host: HostShare = HostShare()
    scripted: str = ""
    """File of scripted outputs in place of a model; see ``weft.engine.scripted.scripted``."""

    @property
    def loaded(self) -> ModelSpec:
        """Model spec for loading: without vision tower if the group encodes no images."""
        media = self.kv.media
        return self.spec if media is None or media.tower else msgspec.structs.replace(self.spec, vision=None)

    @property
    def ranks_beside(self) -> int:
        """Maximum number of ranks on one host, over all groups."""
        return self.host.ranks or self.parallel.ranks_here


__all__ = ["Config", "EngineConfig", "HostShare", "KVConfig", "MediaLimits", "PoolSpec"]
