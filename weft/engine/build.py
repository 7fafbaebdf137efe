"""From a resolved configuration to a runner: weights, attention backend, caches, slot state."""

from __future__ import annotations

import functools

import msgspec
import torch

from weft.attention.base import Backends
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.memory import activation_bytes, pools_for
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.sharding import local_spec
from weft.layers.build import ExpertOptions
from weft.models.loader import Model, load_model
from weft.ops import cpu
from weft.parallel.mesh import Mesh
from weft.runner.graphs import Capture, CudaCapture, GraphOptions, obstacle
from weft.runner.programs import record
from weft.runner.runner import Runner
from weft.runner.trace import StepTrace

log = get_logger(__name__)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_runner(
    config: EngineConfig, *, progress: bool = True, poison: bool = False, mesh: Mesh | None = None
) -> Runner:
    """Loads the model, or the share of it that ``mesh`` has, and preallocates everything a step needs.

    Raises ConfigError, before weights are read, when there is no device or no backend for the model.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no GPU; use --device cpu", param="device")
    device, dtype, spec = torch.device(config.device), DTYPES[config.dtype], config.spec
    local = local_spec(spec, config.parallel.layout)
    invariant = config.runner.deterministic
    backends = choose(
        config.runner.attention_backend, local, dtype, device, config.kv.block_size, invariant=invariant
    )
    rank = 0 if mesh is None else mesh.rank
    trace = StepTrace(trace_of(config.runner.trace, rank)) if config.runner.trace else None
    model = load_model(
        config.model_path,
        spec,
        dtype,
        device,
        config.model.load_format,
        config.model.seed or 0,
        progress,
        mesh,
        quantization=config.model.quantization,
        invariant=invariant,
        experts=ExpertOptions(
            dispatch=config.parallel.moe_dispatch,
            redundant=config.parallel.redundant_experts,
            counts=config.parallel.eplb_interval > 0,
        ),
    )
    kv = config.kv
    if device.type == "cuda" and config.cache.kv_cache_memory is None:
        kv = fit_pools(config, *torch.cuda.mem_get_info(device))
    return Runner(
        model,
        backends,
        kv,
        vocab_size=spec.vocab_size,
        dtype=dtype,
        device=device,
        depth=config.scheduler.steps_in_flight,
        trace=trace,
        poison=poison,
        graphs=graph_options(config, model, backends, progress),
        speculation=config.speculation,
        launcher=mesh.launcher if mesh is not None and mesh.connects else None,
    )


def trace_of(path: str, rank: int) -> str:
    """The file that ``rank`` writes its trace to, of the one that was named: ranks share no file."""
    return f"{path}.rank{rank}" if rank else path


def graph_options(
    config: EngineConfig, model: Model, backends: Backends, progress: bool
) -> GraphOptions | None:
    """How decode steps are captured; None (and a line in the log) where they cannot be, or must not."""
    if not config.runner.decode_graphs or (config.device == "cpu" and not cpu.load()):
        return None
    why = obstacle(model, backends)
    if why is not None:
        log.info("decode steps are launched op by op, and not replayed: %s", why)
        return None
    cpu_device = config.device == "cpu"
    return GraphOptions(
        max_rows=config.scheduler.max_num_seqs,
        capture=recorder(model) if cpu_device else CudaCapture(torch.device(config.device)),
        progress=progress and not cpu_device,
        lazy=cpu_device,
        most_each=config.kv.copies if cpu_device else 1,
        keeps_hidden=config.speculation.speculative_method == "mtp",
    )


def recorder(model: Model) -> Capture:
    """``record``, whose replays tell the model's launcher of their collectives."""
    return functools.partial(record, launcher=model.mesh.launcher)


def fit_pools(config: EngineConfig, free: int, total: int) -> KVConfig:
    """The pools that a GPU's memory holds now that the weights are there.

    ``free``, ``total``: bytes of the device. The share that --gpu-memory-utilization leaves to others, and
    a step's activations, stay free. Raises ConfigError when one full context does not fit.
    """
    cache, scheduler = config.cache, config.scheduler
    spec = local_spec(config.spec, config.parallel.layout)
    others = int(total * (1 - cache.gpu_memory_utilization))
    room = max(free - others - activation_bytes(spec, config.dtype, scheduler), 0)
    kv = config.kv
    pools = pools_for(
        spec,
        kv.block_size,
        config.dtype,
        room,
        kv.max_model_len,
        scheduler,
        copies=kv.copies,
        snapshots=kv.enable_prefix_caching,
    )
    return msgspec.structs.replace(kv, pools=pools)
