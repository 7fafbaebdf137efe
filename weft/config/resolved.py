"""What resolving a configuration gives: sections plus everything derived from them, frozen."""

from __future__ import annotations

import msgspec

from weft.config.cache_layout import TensorLayout, pool_tensors, slot_tensors
from weft.config.sections import (
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
from weft.config.spec import CacheSpec, ModelSpec
from weft.types.faults import Fault
from weft.types.media import BLOCK_ROWS


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cache kind's pool: its facts and how many blocks it gets (the null block not counted)."""

    cache: CacheSpec
    block_size: int
    """Positions of a block; of a state, what its snapshots are made at multiples of."""
    num_blocks: int
    stride: int = 0
    """Of a state: positions between the snapshots of a long prompt; 0 for as many as may be."""

    def nbytes(self, dtype: str) -> int:
        """Bytes of all its blocks in a model of ``dtype``, the null block included."""
        return sum(tensor.nbytes for tensor in self.tensors(dtype))

    def tensors(self, dtype: str) -> tuple[TensorLayout, ...]:
        """What its blocks are made of in a model of ``dtype``."""
        return pool_tensors(self.cache, self.block_size, self.num_blocks, dtype)

    def describe(self, dtype: str) -> str:
        """For the log: ``512 blocks of 64 (full, 18.9 MB in fp8)``."""
        form = "fp8" if self.cache.fp8 else dtype
        size = self.nbytes(dtype) / 1e6
        return f"{self.num_blocks} blocks of {self.block_size} ({self.cache.kind}, {size:.1f} MB in {form})"


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What scheduler and ranks need to know of the images of a model."""

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a token's side."""
    frames: int = 1
    """Most frames of pixels for each frame group of a grid."""
    row_bytes: int
    """Of one row of an embedding on a rank, the rows of all its levels included."""
    cache_bytes: int
    """Of the embeddings that a rank keeps."""
    encode_patches: int
    """Patches that a step encodes; more only of one image alone."""
    most_items: int
    """Images of a prompt."""
    sections: bool = False
    """Whether positions are rotated by frame, row and column."""
    tower: bool = True
    """Whether images are encoded here; else their embeddings come by rooms."""
    takes: bool = False
    """Whether embeddings may come by rooms."""
    shards: bool = False
    """Whether each rank then receives its share of the rows, and ranks exchange them."""
    host_bytes: int = 0
    """Of the second tier: host memory of a rank for embeddings that left the first one."""
    encode_items: int = 32
    """Images that a step of a group that only encodes takes together."""
    levels: int = 0
    """Of a row, beside the one that stands in place of a token's embedding (deepstack)."""
    width: int = 0
    """Elements of a row in each level."""
    block_rows: int = BLOCK_ROWS
    """Rows of a block of the pool."""

    @property
    def blocks(self) -> int:
        """Blocks of the pool of embeddings, beside the null block; none where nothing is kept."""
        return self._holds(self.cache_bytes) if self.tower or self.takes else 0

    @property
    def host_blocks(self) -> int:
        """Blocks of the second tier."""
        return self._holds(self.host_bytes) if self.tower or self.takes else 0

    @property
    def pool_bytes(self) -> int:
        """Device memory of a rank's pool."""
        return (1 + self.blocks) * self.block_rows * self.row_bytes if self.blocks else 0

    def describe(self) -> str:
        """For the log: ``83 blocks of 64 rows (embeddings, 536.9 MB)``."""
        return f"{self.blocks} blocks of {self.block_rows} rows (embeddings, {self.pool_bytes / 1e6:.1f} MB)"

    def blocks_of(self, count: int) -> int:
        """Blocks that an embedding of ``count`` rows takes."""
        return -(-count // self.block_rows)

    def _holds(self, nbytes: int) -> int:
        return nbytes // (self.block_rows * self.row_bytes)


class KVConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kv`` and ``scheduler`` need, no file or device behind it."""

    pools: tuple[PoolSpec, ...]
    block_size: int
    """Positions of a base block, the unit of prefix hashes."""
    enable_prefix_caching: bool
    max_model_len: int
    num_slots: int
    """Slots of the table: running sequences, and those that await their last commit."""
    copies: int = 1
    """Copies of a slot's recurrent state: one, and one for each draft that a step may verify."""
    media: MediaLimits | None = None
    """None where the model takes no images."""

    def tensors(self, pool: PoolSpec, dtype: str) -> tuple[TensorLayout, ...]:
        """What layers read and write of a kind in a model of ``dtype``: blocks, or the states of slots."""
        if pool.cache.kind == "state":
            return slot_tensors(pool.cache, self.num_slots, self.copies, dtype)
        return pool.tensors(dtype)

    @property
    def drafts(self) -> int:
        """Drafts of one sequence that a step may verify."""
        return self.copies - 1


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """What else of a server is on a group's host: cores, memory and GPUs are divided among all of it."""

    ranks: int = 0
    """Ranks of all groups there; 0: this group's are all."""
    first: int = 0
    """Ranks there of the groups before this one, which have the GPUs before its own."""
    gpus: int = 0
    """GPUs of the host."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One group's configuration, resolved. ``model_path`` is a local folder."""

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
    """Its ``role`` is this group's."""
    grammar: GrammarSection = GrammarSection()
    media: MediaSection = MediaSection()
    gpus: tuple[str, ...] = ()
    """Of this host, as CUDA_VISIBLE_DEVICES names them; its ranks get one each, in order (see ``gpu_of``)."""
    replica: int = 0
    """Number of this group among the replicas of the model."""
    faults: tuple[Fault, ...] = ()
    """Planted by tests; there is no flag for it."""
    accepted_names: tuple[str, ...] = ()
    """Names that requests may use beside ``served_names``, and that are never listed."""
    domain: str = ""
    """Folder where the heads of a domain of several replicas meet, if they run on one host."""
    incarnation: int = 0
    """Which start of this group's head it is, if its front is on another host; see weft/types/board.py."""
    group: str = ""
    """The group's name, in a server of several groups."""
    host: HostShare = HostShare()
    scripted: str = ""
    """File of outputs that heads play, without a model; see ``weft.engine.scripted``."""

    @property
    def loaded(self) -> ModelSpec:
        """The model as ranks load it: without a tower where no images are encoded."""
        media = self.kv.media
        return self.spec if media is None or media.tower else msgspec.structs.replace(self.spec, vision=None)

    @property
    def ranks_beside(self) -> int:
        """Ranks of one host at most, those of other groups included."""
        return self.host.ranks or self.parallel.ranks_here


__all__ = ["Config", "EngineConfig", "HostShare", "KVConfig", "MediaLimits", "PoolSpec"]
