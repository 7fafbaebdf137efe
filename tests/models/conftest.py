"""Make small random checkpoints with ``transformers``, and stage steps by hand over a poisoned paged
cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.declared_models import CASES as DECLARED_CASES
from tests.support.declared_models import DEFAULT as DECLARED_DEFAULT
from tests.support.delta_models import CASES as DELTA_CASES
from tests.support.gpt_oss_models import CASES as GPT_OSS_CASES
from tests.support.latent_models import CASES as LATENT_CASES
from tests.support.mixer_models import CASES as MIXER_CASES
from tests.support.mixer_models import DEFAULT as MIXER_DEFAULT
from tests.support.sparse_models import CASES as SPARSE_CASES
from tests.support.specs import first_seen
from tests.support.vision_models import Prompt, Seen, media_of, rope_positions_of, save_tiny
from weft.attention.base import SegmentInput, StepInput
from weft.attention.registry import choose
from weft.config.families import load_spec
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.sizing.media_limits import ahead_groups
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.parallel.comm import drive
from weft.runner.images.visible_ends import ImagesOfRow, ends_of
from weft.runner.kv_tensors import by_layer, stacked
from weft.types.exchange import UNAGREED

Tensor = torch.Tensor
CPU = torch.device("cpu")

_BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FULL, SLIDING = "full_attention", "sliding_attention"

#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases-head-dim": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-mqa-gelu": ("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu", "vocab_size": 97}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2-layer-types-yarn": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True}),
    "qwen3-moe-sparse-step": (
        "Qwen3Moe",
        {**_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {**_MOE, "use_sliding_window": True, "sliding_window": 8, "attention_bias": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window-linear": (
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 10,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        },
    ),
    **LATENT_CASES,
    **DELTA_CASES,
    **GPT_OSS_CASES,
    **SPARSE_CASES,
    **DECLARED_CASES,
    **MIXER_CASES,
}
#: Families with another name of the configuration in transformers.
_CONFIGS = {
    "Gemma3Text": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Every weight matters: norms are not 1, biases not 0, and logits spread over several units."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            # Norms around 1, or around 0 where the published value is the difference from 1.
            around = float(weight[0]) if "norm" in name else 0.0
            weight.normal_(around, 0.3, generator=generator)
        else:
            weight.normal_(0.0, 0.25, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer.normal_(0.0, 0.25, generator=generator)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            order = torch.rand(len(buffer), experts, generator=generator).argsort(dim=1)
            buffer.copy_(order[:, : buffer.shape[1]])


@dataclass(frozen=True)
class Checkpoint:
    """Hold a random checkpoint: the reference model and its saved folder."""

    name: str
    reference: Any
    folder: str

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **more: Any) -> Model:
        spec = load_spec(self.folder, None)
        return load_model(self.folder, spec, dtype, device, progress=False, **more)

    def read(self, dtype: torch.dtype = torch.float32) -> Model:
        """Load the model with plain parameters, for inspection only."""
        return self.load(dtype, pack=False)

    def reference_in_float64(self) -> Any:
        """Return a float64 copy of the reference, with experts that accept doubles."""
        copy = deepcopy(self.reference).double()
        copy.config._experts_implementation = "eager"
        return copy

    @torch.no_grad()
    def expected(self, ids: Seq[int]) -> Tensor:
        """The reference's logits of all positions, computed in one piece without a cache."""
        return self.reference(torch.tensor([list(ids)]), use_cache=False).logits[0]


def _reference_config(name: str) -> Any:
    """Return the configuration of a case, as transformers reads it."""
    family, changes = CASES[name]
    unlike = {name for name, value in changes.items() if value is None and name in _BASE}
    settings = {name: value for name, value in {**_BASE, **changes}.items() if name not in unlike}
    return getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**settings)


def config_for(name: str) -> dict[str, Any]:
    """Return config.json of a case."""
    family = CASES[name][0].removesuffix("Text")
    made: dict[str, Any] = _reference_config(name).to_diff_dict()
    return {**made, "architectures": [f"{family}ForCausalLM"]}


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> Checkpoint:
    family, config = CASES[name][0], _reference_config(name)
    reference = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    _randomize(reference, seed)
    reference.save_pretrained(folder)
    return Checkpoint(name, reference, str(folder))


@dataclass
class Sequence:
    """Hold a sequence: its ids, the number of computed ids, and a block table per KV cache group."""

    ids: list[int]
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    """The first table entry that was not freed, per KV cache group."""
    logits: list[Tensor] = field(default_factory=list)
    """[vocab] of each computed position."""
    slot: int = 0
    live: int = 0
    """Index of the slot's recurrent state that is valid for ``computed``."""
    seen: Seen | None = None
    """Images of the sequence, or None."""


class Paged:
    """Run a model step by step over a paged cache with NaN everywhere except at live tokens.

    Tables are filled in random order. Blocks outside a window are poisoned and reused at once; the old table
    entries still name the reused blocks.
    """

    def __init__(
        self, model: Model, block_size: int = 4, blocks: int = 160, seed: int = 0, copies: int = 4
    ) -> None:
        self.model = model
        self.exchange = UNAGREED
        """The agreement of ranks for every step."""
        spec = model.spec
        self.backends = choose("auto", spec, model.dtype, model.device, block_size)
        self.random = random.Random(seed)
        self.free = [self.random.sample(range(1, blocks), blocks - 1) for _ in spec.caches]
        self.sizes = [math.lcm(block_size, cache.ratio) for cache in spec.caches]
        self.slots = self.random.sample(range(16), 16)
        pools = tuple(
            PoolSpec(cache=cache, block_size=size, num_blocks=blocks - 1)
            for cache, size in zip(spec.caches, self.sizes, strict=True)
        )
        config = KVConfig(
            pools=pools,
            block_size=block_size,
            enable_prefix_caching=False,
            max_model_len=1,
            num_slots=16,
            copies=copies,
        )
        self.kv = by_layer(config, stacked(config, model.dtype, model.device))
        for tensor in self._tensors():
            tensor.fill_(float("nan"))

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self.kv for tensors in layer.values() for tensor in tensors]

    def sequence(self, ids: Seq[int]) -> Sequence:
        kinds = len(self.model.spec.caches)
        return Sequence(
            list(ids), tables=[[] for _ in range(kinds)], first=[0] * kinds, slot=self.slots.pop()
        )

    def reading(self, prompt: Prompt) -> Sequence:
        """A sequence with a prompt's ids and images."""
        result = self.sequence(prompt.ids)
        result.seen = Seen.of(prompt, self.model)
        return result

    def step(
        self,
        prefill: Seq[tuple[Sequence, int]],
        decode: Seq[tuple[Sequence, int]] = (),
        *,
        bound: int = 0,
    ) -> None:
        """Compute ``count`` more tokens of each row, and append the logits to the row's sequence.

        ``bound`` is the excess of the host's context length over the device's.
        """
        rows = [*prefill, *decode]
        spec = self.model.spec
        for sequence, count in rows:
            self.slide(sequence)  # not earlier: the last computed tokens may have been rejected
            self._reserve(sequence, sequence.computed + count + bound)
        first = replace(self._segment(prefill, 0, bound), ends=self._ends(prefill))
        segments = (first, self._segment(decode, first.tokens, bound))
        ids = [i for s, n in rows for i in s.ids[s.computed : s.computed + n]]
        positions = [p for s, n in rows for p in range(s.computed, s.computed + n)]
        step = StepInput(
            ids=self._column(ids),
            positions=self._column(positions),
            writes=self._writes(rows),
            segments=segments,
            prepared=tuple(map(self._prepare, segments)),
            logits_index=torch.arange(len(ids), device=self.model.device),
            exchange=self.exchange,
            rope_positions=self._rope_positions(rows),
            media=media_of(rows),
        )
        with torch.inference_mode():
            generator = self.model.steps(step, self.kv, self.backends)
            logits = drive(generator)
        assert logits.shape == (len(ids), spec.vocab_size)
        assert logits.dtype == self.model.dtype
        begin = 0
        for sequence, count in rows:
            sequence.logits += list(logits[begin : begin + count].cpu())
            sequence.computed += count
            begin += count
        for sequence, count in rows:
            sequence.live = count - 1 if any(sequence is s for s, _ in decode) else 0

    def reject(self, sequence: Sequence, count: int) -> None:
        """Undo the last ``count`` tokens of the decode row just computed, as rejected drafts."""
        sequence.computed -= count
        sequence.live -= count
        del sequence.logits[len(sequence.logits) - count :]

    def _rope_positions(self, rows: Seq[tuple[Sequence, int]]) -> Tensor | None:
        found = rope_positions_of(rows) if self.model.spec.rope.sections else None
        return None if found is None else found.to(self.model.device)

    def _column(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)

    def _segment(self, rows: Seq[tuple[Sequence, int]], begin: int, bound: int) -> SegmentInput:
        counts = np.array([n for _, n in rows], np.int32)
        starts = np.array([s.computed for s, _ in rows], np.int32)
        tables = []
        for kind in range(len(self.model.spec.caches)):
            width = max((len(s.tables[kind]) for s, _ in rows), default=0)
            table = [s.tables[kind] + [0] * (width - len(s.tables[kind])) for s, _ in rows]
            tables.append(self._column(table).view(len(rows), width))
        return SegmentInput(
            begin=begin,
            rows=len(rows),
            tokens=int(counts.sum()),
            host_counts=counts,
            host_starts=starts + np.int32(bound),
            q_offsets=self._column([0, *np.cumsum(counts).tolist()]).int(),
            starts=self._column(starts.tolist()),
            slots=self._column([s.slot for s, _ in rows]),
            live=self._column([s.live for s, _ in rows]),
            tables=tuple(tables),
        )

    def _ends(self, rows: Seq[tuple[Sequence, int]]) -> tuple[Tensor | None, ...]:
        images = [
            ImagesOfRow(s.computed, s.computed + n, [] if s.seen is None else s.seen.spans[:, :2].tolist())
            for s, n in rows
        ]
        return ends_of(images, ahead_groups(self.model.spec), len(self.sizes), self.model.device)

    def _writes(self, rows: Seq[tuple[Sequence, int]]) -> tuple[Tensor, ...]:
        return tuple(
            self._column(
                [
                    s.tables[kind][p // size] * size + p % size
                    for s, n in rows
                    for p in range(s.computed, s.computed + n)
                    if self.model.spec.caches[kind].kind != "state"
                ]
            )
            for kind, size in enumerate(self.sizes)
        )

    def _prepare(self, segment: SegmentInput) -> tuple[object, ...]:
        caches = enumerate(self.model.spec.caches)
        return tuple(
            self.backends.prepare(segment, kind, cache, self.sizes[kind], self.model.dtype)
            for kind, cache in caches
        )

    def _reserve(self, sequence: Sequence, upto: int) -> None:
        for kind, table in enumerate(sequence.tables):
            if self.model.spec.caches[kind].kind == "state":
                continue
            while len(table) * self.sizes[kind] < upto:
                table.append(self.free[kind].pop())

    def slide(self, sequence: Sequence) -> None:
        """Free and poison blocks that no later token can see."""
        for kind, cache in enumerate(self.model.spec.caches):
            if not cache.window:
                continue
            window = -cache.window if cache.kind == "chunk" else cache.window
            keep = first_seen(sequence.computed, window) // self.sizes[kind]
            for entry in range(sequence.first[kind], keep):
                block = sequence.tables[kind][entry]
                for layer in cache.layers:
                    self.kv[layer][kind][0][block] = float("nan")
                self.free[kind].insert(0, block)
            sequence.first[kind] = max(keep, sequence.first[kind])


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a name to its Checkpoint, made once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a case of ``tests.support.vision_models`` to its Checkpoint, made once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = Checkpoint(name, save_tiny(name, folder, partial(_randomize, seed=0)), str(folder))
        return made[name]

    return get


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    return Paged


@pytest.fixture(params=list(CASES))
def checkpoint(request: pytest.FixtureRequest, checkpoints: Any) -> Checkpoint:
    """Each of the random configurations in turn."""
    return checkpoints(request.param)


def _by_family() -> list[Any]:
    """The first configuration of each family with code by default, and some declared ones.

    The others are slow.
    """
    others = (*DECLARED_CASES, *MIXER_CASES)
    written = {name: family for name, (family, _) in CASES.items() if name not in others}
    first = {family: name for name, family in reversed(written.items())}
    # Kimi Linear joins the parts of two other families, and Bailing hybrid its parts: one test of parity runs
    # by default.
    default = {*first.values(), *DECLARED_DEFAULT, *MIXER_DEFAULT} - {"kimi-linear", "bailing-hybrid"}
    return [pytest.param(name, marks=[] if name in default else [pytest.mark.slow]) for name in CASES]


@pytest.fixture(params=_by_family())
def compared(request: pytest.FixtureRequest, checkpoints: Any) -> Checkpoint:
    """Return each random configuration in turn, for tests that compare much of each."""
    return checkpoints(request.param)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random checkpoint of mostly matrices, with multiples of the tile sizes."""
    from tests.models.test_quantized_loading import save_moe

    folder = tmp_path_factory.mktemp("large")
    save_moe(
        folder,
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_experts=4,
        moe_intermediate_size=128,
    )
    return folder
