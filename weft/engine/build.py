"""Creates a runner from a resolved configuration: weights, attention backend, caches, slot state."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from weft.attention.base import Backends
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.families.rope_settings import fit_context
from weft.config.gpus import engine_rank, sharers
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.sections.all import SchedulerSection
from weft.config.sharding import local_spec
from weft.config.sizing.draft import draft_part
from weft.config.sizing.memory import (
    activation_bytes,
    captured_buffer_bytes,
    captured_encoding_bytes,
    pools_for,
)
from weft.config.spec import ModelSpec
from weft.engine.disagg.rank_transfers import check_transfers, open_embeddings, open_transfers, transports_of
from weft.engine.tiers.open_tier import names_of, noted_weights, open_tier
from weft.engine.weights.open_weights import open_weights
from weft.layers.build import AdapterOptions, Build, ExpertOptions
from weft.models.drafted import DraftedModel
from weft.models.eagle import EagleModel, load_eagle
from weft.models.gguf_tensor import readable
from weft.models.loader import Model, load_model
from weft.moe.placement import Placement as ExpertPlacement
from weft.ops import cpu
from weft.ops.coded import DEQUANTIZED
from weft.overlap.overlap_policy import mode_of
from weft.parallel.mesh import Mesh, make_mesh
from weft.runner.graphs.graphs import MOST_ROWS, Capture, CudaCapture, GraphOptions, obstacle
from weft.runner.graphs.mixed import DECODES, TOKENS
from weft.runner.graphs.programs import capture_calls
from weft.runner.graphs.timing import CudaTiming
from weft.runner.runner import Runner
from weft.runner.step_trace import StepTrace
from weft.store.weights_digest import WeightsDigest

log = get_logger(__name__)

STEP, ALONE_S = 6.0, 600.0
"""Time limits of a step. ``STEP`` is a multiple of the rank timeout, for ranks that meet on GPUs. Only
``STEP`` detects a hung collective on GPUs. The first steps compile kernels, so ``STEP`` must not be smaller.
``ALONE_S`` is in seconds, for all other ranks.
"""
CONTEXT = 512 << 20
"""Bytes of GPU memory per process outside torch's count, reserved where processes share a GPU."""
LATER = 1 << 30
"""Bytes of GPU memory reserved for NCCL communicators and captured graphs, created after the caches."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def device_of(config: EngineConfig) -> torch.device:
    """Return the device of every rank. On a GPU: torch's first device, because each rank's process sees one
    GPU.

    Raises ConfigError when torch sees no GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no GPU; use --device cpu", param="device")
    # By default torch computes float32 convolutions (vision towers) with 10 bits of mantissa.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(config.device)


def rank_mesh(config: EngineConfig, rank: int, host: str | None) -> Mesh:
    """Return the mesh of ``rank``, not connected yet. ``host``: see ``GroupComm``. Raises ConfigError."""
    parallel = config.parallel
    return make_mesh(
        parallel.layout,
        rank,
        host=host,
        device=device_of(config),
        collectives=parallel.collectives,
        ordered=config.runner.deterministic,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with weights on a rank, without caches."""

    config: EngineConfig
    model: Model
    backends: Backends
    mesh: Mesh | None
    kv: KVConfig
    """KV configuration within the memory of the rank. The ranks of a group agree on the minimum."""
    trace: StepTrace | None
    progress: bool
    poison: bool
    weights: WeightsDigest | None
    """Digest of the weights, as computed for the KV disk tier; None without a tier."""

    def runner(self, kv: KVConfig | None = None) -> Runner:
        """Allocate all memory for steps, with the pools of ``kv`` (default: the rank's), and return the
        runner. May be called once.

        Opens the transfers of the rank. An unconnected rank on a GPU also runs warm-up steps. Raises
        ConfigError.
        """
        config = self.config
        mesh = self.mesh
        meets = mesh is not None and mesh.connects
        device = device_of(config)
        kv = kv or self.kv
        rank = engine_rank(config) if mesh is None else mesh.rank
        runner = Runner(
            self.model,
            self.backends,
            kv,
            vocab_size=config.spec.vocab_size,
            dtype=DTYPES[config.dtype],
            device=device,
            depth=config.scheduler.steps_in_flight,
            trace=self.trace,
            step_timeout=STEP * config.parallel.rank_timeout if meets and device.type == "cuda" else ALONE_S,
            poison=self.poison,
            graphs=graph_options(config, self.model, self.backends, self.progress),
            speculation=config.speculation,
            launcher=mesh.launcher if mesh is not None and meets else None,
            processed=config.runner.logprobs_mode == "processed_logprobs",
            transfers=open_transfers(config, kv, rank),
            embeddings=open_embeddings(config, rank),
        )
        runner.tier = open_tier(config, runner, rank, self.backends, self.weights)
        # Memory that a network card or another library maps must keep its pages.
        plain = config.transfer.role == "unified" or {"shm", "tcp"}.issuperset(transports_of(config))
        caches = runner.freeable if plain else tuple
        names = names_of(config, rank, self.weights)
        # A temporary model must not add callbacks to the mesh.
        apart = None if mesh is None else replace(mesh, formed=[])
        layouts = AdapterOptions(like_places=config.lora.max_loras > 0)
        again = functools.partial(
            read_model, config, apart, config.model_path, config.loaded, adapters=layouts
        )
        runner.weights = open_weights(self.model, rank, again, caches, names)
        # A warm-up step of connected ranks would need collectives before the group has formed.
        if device.type == "cuda" and not meets:
            runner.warm_up(config.scheduler.max_num_batched_tokens, self.progress)
        return runner


def build_runner(
    config: EngineConfig, *, progress: bool = True, poison: bool = False, mesh: Mesh | None = None
) -> Runner:
    """Load the model, or the share of ``mesh``, and allocate all memory for steps. Return the runner.

    Raises ConfigError when there is no device, or no backend for the model. Both are checked before weights
    are read.
    """
    return load(config, progress=progress, poison=poison, mesh=mesh).runner()


def load(
    config: EngineConfig, *, progress: bool = True, poison: bool = False, mesh: Mesh | None = None
) -> LoadedModel:
    """Load the weights of the model, or of the share of ``mesh``. Raises the errors of ``build_runner``.

    On a GPU, unused memory is freed first, and the pools take the memory left after the weights unless
    --kv-cache-memory fixes their size.
    """
    device = device_of(config)
    check_transfers(config)
    if device.type == "cuda":
        release_unused()
    dtype = DTYPES[config.dtype]
    spec = config.loaded
    local = local_spec(spec, config.parallel.layout)
    invariant = config.runner.deterministic
    backends = choose(
        config.runner.attention_backend, local, dtype, device, config.kv.block_size, invariant=invariant
    )
    rank = engine_rank(config) if mesh is None else mesh.rank
    path = config.runner.trace
    trace = StepTrace(trace_of(path, rank, config.group)) if path else None
    weights = noted_weights(config)
    model = load_weights(config, mesh, progress)
    # Without a fixed size, the pools take the GPU memory left after the weights.
    kv = config.kv
    if device.type == "cuda" and config.cache.kv_cache_memory is None:
        # Return cached memory first, so that `mem_get_info` counts the memory as free.
        torch.cuda.empty_cache()
        kv = fit_pools(config, *torch.cuda.mem_get_info(device), used=torch.cuda.memory_reserved(device))
    return LoadedModel(
        config=config,
        model=model,
        backends=backends,
        mesh=mesh,
        kv=kv,
        trace=trace,
        progress=progress,
        poison=poison,
        weights=weights,
    )


def read_model(
    config: EngineConfig,
    mesh: Mesh | None,
    path: str,
    spec: ModelSpec,
    *,
    progress: bool = False,
    adapters: AdapterOptions = AdapterOptions(),
    files: Sequence[Path] | None = None,
    changed: set[str] | None = None,
    placements: Sequence[ExpertPlacement] | None = None,
) -> Model:
    """Load a model of this rank from ``path``, with the settings of ``config``. ``files`` may be a GGUF file
    like the file of ``path``. For the other parameters and the errors see ``load_model``."""
    files = None if files is None else readable(files, Path(path))
    return load_model(
        path,
        spec,
        DTYPES[config.dtype],
        device_of(config),
        config.model.load_format if files is None else "safetensors",
        config.model.seed or 0,
        progress,
        mesh,
        quantization=config.model.quantization,
        invariant=config.runner.deterministic,
        experts=ExpertOptions(
            dispatch=config.parallel.moe_dispatch,
            redundant=config.parallel.redundant_experts,
            counts=config.parallel.eplb_interval > 0,
        ),
        adapters=adapters,
        files=files,
        changed=changed,
        placements=placements,
    )


def load_weights(config: EngineConfig, mesh: Mesh | None, progress: bool) -> Model:
    """Load the model, or the share of ``mesh``, with the draft model if there is one. Raises the errors of
    ``load_model``."""
    spec, draft = config.loaded, config.speculation.speculative_model
    lora = config.lora
    places = AdapterOptions(
        places=lora.max_loras,
        rank=lora.max_lora_rank,
        experts=lora.lora_experts,
        saved=lora.lora_saved_modules,
    )
    model = read_model(config, mesh, config.model_path, spec, progress=progress, adapters=places)
    if spec.draft is None or draft is None:
        return model
    part = fit_context(draft_part(spec), config.kv.max_model_len)
    if spec.draft.eagle is None:
        return DraftedModel(model, read_model(config, mesh, draft, part, progress=progress))
    build = Build(
        dtype=DTYPES[config.dtype],
        device=device_of(config),
        mesh=mesh or Mesh(),
        quantization=config.model.quantization,
        invariant=config.runner.deterministic,
        experts=ExpertOptions(),
    )
    section = config.model
    head = load_eagle(draft, part, build, section.load_format, section.seed or 0, progress)
    return EagleModel(model, head)


def release_unused() -> None:
    """Free GPU memory of closed engines in the process."""
    gc.collect()
    # torch keeps a workspace of cuBLAS (32 MiB on Hopper) for every stream that ever ran a product.
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()


def trace_of(path: str, rank: int, group: str = "") -> str:
    """Return the trace file of ``rank`` in ``group``, derived from ``path``. Two ranks never share a file."""
    file = Path(path)
    more = [group] * bool(group) + [f"rank{rank}"] * bool(rank)
    return str(file.with_name(".".join([file.stem, *more]) + file.suffix)) if more else path


def graph_options(
    config: EngineConfig, model: Model, backends: Backends, progress: bool
) -> GraphOptions | None:
    """Return the options for capturing decode steps, or None where capture is disabled or impossible. The
    reason is logged.
    """
    if not config.runner.decode_graphs or (config.device == "cpu" and not cpu.load()):
        return None
    why = obstacle(model, backends)
    if why is not None:
        log.info("decode steps are not captured as graphs: %s", why)
        return None
    if config.device == "cpu":
        return GraphOptions(
            max_rows=config.scheduler.max_num_seqs,
            capture=capturer(model),
            exact=True,
            lazy=True,
            most_each=config.kv.copies,
            keeps_hidden=config.speculation.speculative_method in ("mtp", "eagle3"),
        )
    meets = model.mesh.layout.expert_ranks > 1
    return GraphOptions(
        max_rows=config.scheduler.max_num_seqs,
        capture=CudaCapture(torch.device(config.device)),
        progress=progress,
        # Capture needs a communicator, which exists only after the group has formed and changes with each
        # epoch.
        lazy=meets,
        most_each=config.kv.copies,
        micro_batches=meets,
        timing=CudaTiming if mode_of(config.parallel, config.device) == "measured" else None,
        prompt_tokens=0 if meets else config.scheduler.max_num_batched_tokens,
        keeps_hidden=config.speculation.speculative_method in ("mtp", "eagle3"),
    )


def capturer(model: Model) -> Capture:
    """Return ``capture_calls``, bound to the model's launcher so replays report their collectives."""
    return functools.partial(capture_calls, launcher=model.mesh.launcher)


def captured_steps(scheduler: SchedulerSection) -> SchedulerSection:
    """Return ``scheduler`` limited to the largest captured step. Captures share one memory pool, because one
    graph runs at a time."""
    most = max(TOKENS[-1] + DECODES[-1], MOST_ROWS)
    return msgspec.structs.replace(
        scheduler,
        max_num_seqs=min(scheduler.max_num_seqs, MOST_ROWS),
        max_num_batched_tokens=min(scheduler.max_num_batched_tokens, most),
        steps_in_flight=1,
    )


def fit_pools(config: EngineConfig, free: int, total: int, used: int = 0) -> KVConfig:
    """Return the KV configuration with pools sized for a GPU's memory after the weights.

    ``free``, ``total``: bytes of the device. ``used``: bytes of the process. The share outside of
    --gpu-memory-utilization stays free, as does memory for the activations of a step and of captured steps,
    whose memory no other step uses. Ranks on the same GPU get
    equal parts of the rest, in any order of loading. Raises ConfigError when one full context does not fit.
    """
    cache = config.cache
    scheduler = config.scheduler
    spec = local_spec(config.loaded, config.parallel.layout)
    transfer = free - int(total * (1 - cache.gpu_memory_utilization))
    if config.parallel.layout.expert_ranks > 1 and config.parallel.collectives != "gloo":
        transfer -= LATER
    ranks = sharers(config.parallel, config.gpus, config.host)
    # `free` depends on the load progress of other ranks on the GPU; a fixed part per rank does not.
    if ranks > 1:
        transfer = min(transfer, int(total * cache.gpu_memory_utilization) // ranks - used - CONTEXT)
    kv = config.kv
    images = 0 if kv.media is None else kv.media.pool_bytes
    packed = config.model.quantization != "none" or config.loaded.quantized is not None
    weights = DEQUANTIZED * DTYPES[config.dtype].itemsize if packed else 0
    activations = activation_bytes(spec, config.dtype, scheduler)
    if config.runner.decode_graphs:
        without = msgspec.structs.replace(spec, vision=None)
        steps = activation_bytes(without, config.dtype, captured_steps(scheduler))
        tower = 0
        if spec.vision is not None:
            tower = captured_encoding_bytes(spec.vision, config.dtype)
            activations += captured_buffer_bytes(spec.vision, config.dtype)
        activations += max(steps, tower)  # one graph runs at a time
    transfer = max(transfer - activations - images - weights, 0)
    pools = pools_for(
        spec,
        kv.block_size,
        config.dtype,
        transfer,
        kv.max_model_len,
        scheduler,
        copies=kv.copies,
        snapshots=kv.enable_prefix_caching,
        transfers=config.transfer.role != "unified",
    )
    return msgspec.structs.replace(kv, pools=pools)
