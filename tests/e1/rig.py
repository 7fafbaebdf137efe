"""Models and engines for tests of bitwise invariance, and the logits of every sampled position."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.e0.rig import submit
from tests.support.specs import model_spec
from weft.attention.base import AttentionBackend, Backends
from weft.attention.registry import BACKENDS, choose
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.resolve import with_cache_dtype
from weft.config.resolved import EngineConfig, KVConfig, PoolSpec
from weft.config.sections.all import (
    CacheSection,
    ModelSection,
    RunnerSection,
    SchedulerSection,
    SpeculationSection,
)
from weft.config.sharding import local_spec
from weft.config.spec import CacheSpec
from weft.engine.build import capturer
from weft.engine.core import EngineCore
from weft.engine.start import alone
from weft.layers.build import ExpertOptions
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.ops import cpu
from weft.ops.cpu import linear as cpu_linear
from weft.parallel.mesh import Mesh
from weft.runner.graphs.graphs import GraphOptions, obstacle
from weft.runner.result import Drawn, HostCopy
from weft.runner.runner import Runner
from weft.runner.step_handle import StepHandle
from weft.scheduler.sequence import Running
from weft.speculation.base import Drafter
from weft.types.messages import Submit, TokenEvent
from weft.types.plan import AllocSlot, StepPlan, StepResult, TokenMasks
from weft.types.sampling import TokenParams

CPU = torch.device("cpu")
BLOCK = 16
MAX_LEN = 384
VOCAB = 131
FP8 = torch.float8_e4m3fn
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = {"use_sliding_window": True, "sliding_window": 70}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
INDEX = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 24}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": 70}),
    "qwen2_mixed": ("Qwen2", {**_MIXED, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "qwen3_next": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_key_value_heads": 6,
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "moe_intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_state": 20,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")),
            "hidden_size": 96,
            "num_heads": 12,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 20,
        },
    ),
    "falcon_mamba": (
        "FalconMamba",
        {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim")),
            "intermediate_size": 192,
            "state_size": 12,
            "time_step_rank": 20,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mamba_d_state": 12,
            "mamba_dt_rank": 20,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "rope_parameters": {"rope_theta": None},
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "first_k_dense_replace": 1,
            "num_key_value_heads": 6,
            "head_dim": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "moe_intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 70}),
    "deepseek_v32": ("DeepseekV32", {**LATENT, **INDEX}),
    "glm_dsa": ("GlmMoeDsa", {**LATENT, **INDEX, "indexer_types": ["full", "shared", "full"]}),
    "deepseek_v4": (
        "DeepseekV4",
        {
            **INDEX,
            "num_key_value_heads": 1,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "sliding_window": 24,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 48,
            "o_groups": 2,
            "o_lora_rank": 32,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
        },
    ),
}


def make_checkpoint(root: Path, shape: str) -> Path:
    """Write a random checkpoint. qk norms and biases are random too."""
    import transformers

    family, settings = SHAPES[shape]
    settings = {**_COMMON, **settings}
    settings["num_hidden_layers"] = len(settings.get("layer_types", "..."))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**settings)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder = root / shape
    model.save_pretrained(folder)
    return folder


def attention_backends(name: str, dtype: torch.dtype) -> AttentionBackend:
    """The backend called ``name``; skips the test where it isn't built or does not serve ``dtype``."""
    known = CacheSpec(kind="full", layers=(0,), window=0, kv_heads=2, head_dim=16)
    try:
        backend = BACKENDS.get(name)()
        backend.check(known, model_spec(), 16, dtype, CPU)
    except (ConfigError, ImportError) as error:
        pytest.skip(f"attention backend {name}: {error}")
    assert backend.invariant
    return backend


@cache
def model_of(
    folder: Path,
    dtype: str,
    form: str,
    mtp: int = 0,
    mesh: Mesh | None = None,
    experts: ExpertOptions | None = None,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
) -> tuple[Model, Backends]:
    """The model and its attention in one of the forms that promise E1.

    cpp         the C++ operations, and nothing asked of them; of latent attention one form
    fallback    --deterministic where the C++ operations are not there
    """
    spec, kind = load_spec(str(folder), None, mtp=mtp), DTYPES[dtype]
    spec = with_cache_dtype(spec, CacheSection(kv_cache_dtype=kv_cache_dtype))
    mine = spec if mesh is None else local_spec(spec, mesh.layout)
    if form == "cpp":
        if not cpu.load():
            pytest.skip("the C++ operations are not built")
        if not cpu_linear.available():
            pytest.skip("the C++ products are for CPUs with AVX2 or AVX-512")
        backends = choose("cpu", mine, kind, CPU, BLOCK, invariant=True)
        asked = spec.mla is not None
        model = load_model(
            str(folder), spec, kind, CPU, progress=False, invariant=asked, mesh=mesh, experts=experts
        )
    else:
        backends = choose("invariant", mine, kind, CPU, BLOCK, invariant=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WEFT_DISABLE_CPU_OPS", "1")
            cpu.load.cache_clear()
            try:
                model = load_model(str(folder), spec, kind, CPU, progress=False, invariant=True, mesh=mesh)
            finally:
                cpu.load.cache_clear()
    return model, backends


Bits = dict[tuple[int, int], list[torch.Tensor]]
"""(seed, position) of each sampled token -> the logits of each time the position was sampled."""


class Witness(Runner):
    """A runner that records the logits of every sampled row, and the steps in flight."""

    def watch(self) -> None:
        self.bits: Bits = {}
        self.seeds: dict[int, int] = {}
        self.prefill_counts: list[int] = []
        self.in_flight = self.deepest = 0

    def forward(self, plan: StepPlan) -> StepHandle:
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        self.prefill_counts.append(int(plan.prefill.count.max(initial=0)))
        return super().forward(plan)

    def read(self, handle: StepHandle) -> StepResult:
        self.in_flight -= 1
        return super().read(handle)

    def _sample(self, handle: StepHandle, masks: TokenMasks | None) -> HostCopy | Drawn:
        batch, logits = handle.forwarded.result()
        for op in handle.plan.ops:
            if isinstance(op, AllocSlot):
                self.seeds[op.slot] = op.seed
        copy = super()._sample(handle, masks)
        rows, decode = batch().sample_rows, handle.plan.decode
        # Logits behind the last accepted draft belong to a rejected continuation.
        accepted = np.zeros(decode.rows, np.int64) if copy.accepted is None else copy.accepted.numpy()
        true = [np.ones(int(handle.plan.prefill.sample.sum()), bool)]
        true += [np.arange(count) <= right for count, right in zip(decode.count, accepted, strict=True)]
        for slot, row, position, holds in zip(
            rows.slot_host.tolist(),
            rows.logits_row.tolist(),
            rows.position.tolist(),
            np.concatenate(true).tolist(),
            strict=True,
        ):
            if holds:
                self.bits.setdefault((self.seeds[slot], position), []).append(logits[row].clone())
        return copy


def force_preemptions(engine: EngineCore, number: int, every: int = 7) -> list[TokenEvent]:
    """Send a running sequence back to the queue before every seventh step, with steps in flight."""
    state = engine.scheduler._state
    running = [sequence for sequence in state.running if not sequence.protected]
    if running and number % every == every - 1:
        victim = running[number // every % len(running)]
        assert isinstance(victim.state, Running)
        state.preempt(victim, victim.state)
    return []


def requests_of_lengths(count: int) -> list[Submit]:
    """Return requests of different lengths; every second request is sampled."""
    return [
        submit(
            i + 1,
            [(5 * i + 3 * j) % VOCAB for j in range(4 + 9 * i)],
            TokenParams(temperature=0.7 * (i % 2), max_tokens=6 + 5 * i),
            request=i,
        )
        for i in range(count)
    ]


def make_engine(
    folder: Path,
    dtype: str,
    form: str,
    *,
    blocks: int = 2048,
    chunk: int = 0,
    depth: int = 1,
    caching: bool = False,
    max_num_seqs: int = 80,
    replay: bool = False,
    speculation: SpeculationSection | None = None,
    drafter: Drafter | None = None,
    mesh: Mesh | None = None,
    experts: ExpertOptions | None = None,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
) -> tuple[EngineCore, Witness]:
    """An engine (with ``mesh``, of one rank) whose caches are full of NaN.

    ``replay``: decode steps are replayed where they can be.

    ``drafter`` takes the place of the one that ``speculation`` names.
    """
    speculation = speculation or SpeculationSection()
    mtp = int(speculation.speculative_method == "mtp")
    of = model_of if mesh is None else model_of.__wrapped__  # ranks share nothing
    model, backends = of(folder, dtype, form, mtp, mesh, experts, kv_cache_dtype)
    spec = model.spec
    sizes = {"full": blocks, "latent": blocks, "compressed": blocks, "window": 2048, "state": 256}
    pools = tuple(PoolSpec(cache=c, block_size=BLOCK, num_blocks=sizes[c.kind]) for c in spec.caches)
    kv = KVConfig(
        pools=pools,
        block_size=BLOCK,
        enable_prefix_caching=caching,
        max_model_len=MAX_LEN,
        num_slots=max_num_seqs * depth,
        copies=1 + speculation.drafts,
    )
    config = EngineConfig(
        model_path=str(folder),
        tokenizer_path=str(folder),
        served_names=("m",),
        spec=spec,
        dtype=dtype,
        device="cpu",
        model=ModelSection(model=str(folder)),
        cache=CacheSection(block_size=BLOCK, enable_prefix_caching=caching, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerSection(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            long_prefill_token_threshold=chunk,
            steps_in_flight=depth,  # type: ignore[arg-type]
        ),
        runner=RunnerSection(device="cpu"),
        kv=kv,
        speculation=speculation,
    )
    options = None
    if replay and obstacle(model, backends) is None:
        options = GraphOptions(
            max_rows=max_num_seqs, capture=capturer(model), lazy=True, exact=True, most_each=kv.copies
        )
    runner = Witness(
        model,
        backends,
        kv,
        vocab_size=VOCAB,
        dtype=DTYPES[dtype],
        device=CPU,
        depth=depth,
        poison=True,
        step_timeout=60,
        graphs=options,
        speculation=speculation,
        launcher=None if mesh is None else mesh.launcher,
    )
    if drafter is not None:
        runner.drafter = drafter
    runner.watch()
    for tensor in (t for layer in runner.cache for tensors in layer.values() for t in tensors):
        tensor.view(torch.uint8).fill_(0x7F) if tensor.dtype == FP8 else tensor.fill_(float("nan"))
    engine = EngineCore(config, runner=alone(runner.kv, lambda kv: runner))
    assert engine.deterministic, runner.varying
    return engine, runner
