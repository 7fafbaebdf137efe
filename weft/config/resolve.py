"""From settings to an engine's configuration, in named steps, before anything starts.

Every step checks what it can and raises ConfigError naming the flags at fault and values that would work.
The result is frozen and holds no device, no open file and no torch.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from weft.common.cores import usable_cores
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config import devices, hub
from weft.config.budget import check_budget, with_budget
from weft.config.experts import check_experts
from weft.config.families import load_spec
from weft.config.flags import parse_size
from weft.config.front_section import check_front
from weft.config.gpus import gpus_here, gpus_of_group, sharers
from weft.config.hosts import check_hosts
from weft.config.media_limits import embedding_bytes, media_limits
from weft.config.media_section import check_media
from weft.config.memory import (
    GIB,
    activation_bytes,
    bytes_for,
    live_bytes,
    longest_that_fits,
    pools_for,
    show_bytes,
    weight_bytes,
)
from weft.config.names import accepted_names, served_names
from weft.config.resolved import EngineConfig, HostShare, KVConfig
from weft.config.sections import (
    CacheSection,
    Config,
    FrontSection,
    GrammarSection,
    MediaSection,
    ModelSection,
    ParallelSection,
    RunnerSection,
    SchedulerSection,
    SpeculationSection,
)
from weft.config.sharding import local_spec
from weft.config.spec import ModelSpec
from weft.config.transfers import check_transfer

log = get_logger(__name__)

RANKS_EACH_CORE = 4
"""Ranks that may share one CPU core; each has a thread of its own, and memory for its part of the model."""
_CPU_CACHE_MOST = 4 * GIB
#: Share of the memory that the weights leave which the cache may take by default on a CPU.
_CPU_CACHE_SHARE = 0.5


def resolve(config: Config, group: str = "", host: HostShare = HostShare()) -> EngineConfig:
    """The configuration of one engine. Raises ConfigError; see the steps.

    ``group``, ``host``: its name, and what else is on its host, in a server of several groups.
    """
    model, cache, runner, speculation = config.model, config.cache, config.runner, config.speculation
    check_runs_model(config.front)
    device = choose_device(runner)
    transfer = check_transfer(config.transfer, config.parallel, device)
    scheduler = with_depth(with_budget(config.scheduler, device, speculation.drafts), device)
    check_budget(scheduler, cache.block_size, speculation.drafts)
    check_files(runner, config.front, config.media)
    path = hub.resolve_model_path(model.model, model.revision, load_format=model.load_format)
    tokenizer_path = hub.resolve_tokenizer_path(model.tokenizer, path)
    check_checkpoint(model, path, tokenizer_path)
    check_ngram(speculation)
    check_grammar(config.grammar)
    spec = load_spec(
        path,
        model.num_hidden_layers_override,
        trust_remote_code=model.trust_remote_code,
        mtp=int(speculation.speculative_method == "mtp"),
        language_model_only=model.language_model_only,
    )
    spec = check_experts(with_cache_dtype(spec, cache), config.parallel)
    local = local_spec(spec, check_hosts(config.parallel).layout)
    if not host.ranks:
        check_cores(config.parallel, device)
    here = gpus_here(config.parallel, device)
    host = msgspec.structs.replace(host, gpus=len(here)) if host.ranks else host
    gpus = gpus_of_group(here, config.parallel, host)
    dtype = choose_dtype(model, spec, device, path)
    copies = 1 + speculation.drafts
    rooms = transfer.role != "unified"
    parts = (model, cache, scheduler, copies)
    images = embedding_bytes(spec, dtype, model.max_model_len, config.media, host=device == "cpu")
    num_bytes = cache_bytes(spec, dtype, device, *parts, config.parallel, host, rooms, images)
    kv = divide_cache(local, dtype, num_bytes, *parts, rooms)
    kv = msgspec.structs.replace(kv, media=media_limits(spec, dtype, kv.max_model_len, config.media))
    return EngineConfig(
        model_path=path,
        tokenizer_path=tokenizer_path,
        served_names=served_names(model, path),
        accepted_names=accepted_names(model, path),
        spec=spec,
        dtype=dtype,
        device=device,
        model=model,
        cache=cache,
        scheduler=scheduler,
        runner=runner,
        kv=kv,
        speculation=speculation,
        parallel=config.parallel,
        transfer=transfer,
        grammar=config.grammar,
        media=config.media,
        gpus=gpus,
        group=group,
        host=host,
    )


def divide_cache(
    spec: ModelSpec,
    dtype: str,
    num_bytes: int,
    model: ModelSection,
    cache: CacheSection,
    scheduler: SchedulerSection,
    copies: int,
    rooms: bool,
) -> KVConfig:
    """The pools that a rank makes of ``num_bytes``, and the context length. ``spec``: of a rank's share.
    ``rooms``: as in ``bytes_for``."""
    max_model_len = choose_max_model_len(spec, dtype, num_bytes, model, cache, scheduler, copies, rooms)
    return KVConfig(
        pools=pools_for(
            spec,
            cache.block_size,
            dtype,
            num_bytes,
            max_model_len,
            scheduler,
            copies=copies,
            snapshots=cache.enable_prefix_caching,
            rooms=rooms,
        ),
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        max_model_len=max_model_len,
        num_slots=scheduler.max_num_seqs * scheduler.steps_in_flight,
        copies=copies,
    )


def with_depth(scheduler: SchedulerSection, device: str) -> SchedulerSection:
    """``scheduler`` with steps in flight as set or, by default, by the device."""
    if scheduler.steps_in_flight:
        return scheduler
    # A CPU's threads all compute: planning beside them takes from them what it saves (docs/adr/0001).
    return msgspec.structs.replace(scheduler, steps_in_flight=2 if device == "cuda" else 1)


def with_cache_dtype(spec: ModelSpec, cache: CacheSection) -> ModelSpec:
    """``spec`` with cache kinds as ``--kv-cache-dtype`` says. Raises ConfigError when it changes none."""
    if cache.kv_cache_dtype == "auto":
        return spec
    caches = tuple(
        msgspec.structs.replace(kind, fp8=True, exact=spec.mla.rope if kind.width and spec.mla else 0)
        if kind.kind in ("full", "window", "latent") and kind.form in ("gqa", "latent")
        else kind
        for kind in spec.caches
    )
    if caches == spec.caches:
        raise ConfigError(
            f"--kv-cache-dtype fp8: {spec.architecture} has no cache that can be kept in 8 bits; use auto",
            param="--kv-cache-dtype",
        )
    return msgspec.structs.replace(spec, caches=caches)


def check_runs_model(front: FrontSection) -> None:
    """Refuses a script where an engine is resolved: see ``weft.config.scripted``."""
    if front.scripted is not None:
        raise ConfigError(
            "--scripted plays outputs without a model, and only `weft serve` can: leave it out",
            param="--scripted",
        )


def check_files(runner: RunnerSection, front: FrontSection, media: MediaSection) -> None:
    """Files that settings name can be opened later; what settings of one section say together."""
    if front.chat_template is not None and not Path(front.chat_template).is_file():
        raise ConfigError(
            "--chat-template names no file: give the path of a Jinja template", param="--chat-template"
        )
    if runner.trace is not None:
        trace = Path(runner.trace)
        if trace.is_dir() or not trace.absolute().parent.is_dir():
            raise ConfigError("--trace must name a file in a folder that exists", param="--trace")
    if runner.trace_requests is not None:
        folder = Path(runner.trace_requests)
        if not (folder.is_dir() or folder.absolute().parent.is_dir()):
            raise ConfigError(
                "--trace-requests must name a folder, or one to be made in a folder that exists",
                param="--trace-requests",
            )
    check_front(front)
    check_media(media)


def check_checkpoint(model: ModelSection, path: str, tokenizer_path: str) -> None:
    """Refuses code and pickles that a checkpoint brings, unless told otherwise, and what is no checkpoint."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{model.model!r} is no checkpoint that Weft can read: it has no config.json beside "
            "*.safetensors weights",
            param="--model",
        )
    if not model.trust_remote_code:
        for folder, name in ((path, "config.json"), (tokenizer_path, "tokenizer_config.json")):
            if _read_object(Path(folder) / name).get("auto_map"):
                raise ConfigError(
                    f"the checkpoint brings its own code (auto_map in {name}), which is refused; "
                    "pass --trust-remote-code if you trust who made it",
                    param="--trust-remote-code",
                )
    if model.load_format == "dummy":
        return
    safe = _has(path, "*.safetensors")
    pickles = _has(path, "*.bin") or _has(path, "*.pt") or _has(path, "*.pth")
    if model.load_format == "pickle":
        if not pickles:
            raise ConfigError(
                "--load-format pickle: the checkpoint has no *.bin, *.pt or *.pth file", param="--load-format"
            )
    elif not safe and pickles:
        raise ConfigError(
            "the checkpoint has its weights as pickles only, which can run code when loaded and are refused; "
            "pass --load-format pickle if you trust who made it",
            param="--load-format",
        )
    elif not safe:
        raise ConfigError(
            "the checkpoint has no *.safetensors file: pass --load-format pickle if it has its weights as "
            "pickles and you trust who made it, or --load-format dummy for random weights",
            param="--load-format",
        )


def _has(folder: str, pattern: str) -> bool:
    return any(Path(folder).glob(pattern))


def _read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty where there is no such file. Raises ConfigError when it is not one."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} of the checkpoint is not readable JSON", param="--model") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{path.name} of the checkpoint is not a JSON object", param="--model")
    return result


def check_cores(parallel: ParallelSection, device: str) -> None:
    """Warns of more ranks on this host than CPU cores that compute for them, and refuses far more."""
    ranks = parallel.ranks_here
    cores = usable_cores()
    if device != "cpu" or ranks <= cores:
        return
    tensor = parallel.tensor_parallel_size
    data = parallel.data_parallel_size
    sizes = f"--tensor-parallel-size {tensor} x --data-parallel-size {data}"
    here = f"{ranks} ranks" if parallel.nnodes == 1 else f"{ranks} ranks on each of {parallel.nnodes} hosts"
    if ranks > RANKS_EACH_CORE * cores:
        raise ConfigError(
            f"{sizes}: {here} are too many for the {cores} CPU cores of this process, which take "
            f"{RANKS_EACH_CORE} each: make the product {RANKS_EACH_CORE * cores * parallel.nnodes} at most",
            param="--data-parallel-size" if data > 1 else "--tensor-parallel-size",
        )
    log.warning("%s: %s, with at least one thread each, share %d CPU cores", sizes, here, cores)


def choose_device(runner: RunnerSection) -> str:
    """ "cuda" where asked for or, with ``auto``, where there is a GPU that torch can use; else "cpu"."""
    if runner.device == "cpu":
        return "cpu"
    if devices.gpu_memory() is not None:
        return "cuda"
    if runner.device == "cuda":
        why = "the installed torch is a CPU build" if devices.torch_is_cpu_only() else "no GPU was found"
        raise ConfigError(f"--device cuda: {why}; use --device cpu or auto", param="--device")
    return "cpu"


def check_ngram(speculation: SpeculationSection) -> None:
    """Lengths that contradict each other."""
    if speculation.ngram_min_length > speculation.ngram_max_length:
        raise ConfigError(
            f"--ngram-min-length {speculation.ngram_min_length} is more than --ngram-max-length "
            f"{speculation.ngram_max_length}",
            param="--ngram-min-length",
        )


def check_grammar(grammar: GrammarSection) -> None:
    """Raises ConfigError for a backend that is not installed."""
    if grammar.grammar_backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            "--grammar-backend xgrammar needs the package xgrammar; install weft[xgrammar]",
            param="grammar_backend",
        )


def choose_dtype(model: ModelSection, spec: ModelSpec, device: str, path: str) -> str:
    """The type of weights and cache: as asked, the checkpoint's, or float32 for a bundled model on a CPU."""
    if model.dtype != "auto":
        return model.dtype
    return "float32" if device == "cpu" and Path(path).resolve().is_relative_to(hub.BUNDLED) else spec.dtype


def cache_bytes(
    spec: ModelSpec,
    dtype: str,
    device: str,
    model: ModelSection,
    cache: CacheSection,
    scheduler: SchedulerSection,
    copies: int = 1,
    parallel: ParallelSection = ParallelSection(),
    host: HostShare = HostShare(),
    rooms: bool = False,
    images: int = 0,
) -> int:
    """Bytes for a rank's cache pools: as asked, or what its device leaves, at most what all sequences could
    use. A host's ranks, of all groups, share a CPU's memory evenly, and so do those that have the same GPU.

    ``spec``: of the whole model. ``copies``: of a slot's recurrent state. ``rooms``: as in ``bytes_for``.
    ``images``: bytes of a rank's embeddings.

    On a GPU the default is a first division from estimates; the engine divides again, with ``pools_for``,
    when the weights are loaded.
    """
    if cache.kv_cache_memory is not None:
        asked = parse_size(cache.kv_cache_memory)
        assert asked is not None, "checked when the flag was parsed"
        _check_asked(asked, device, _sharers(parallel, device, host))
        return asked
    weights = weight_bytes(spec, dtype, model.quantization, parallel.layout, parallel.redundant_experts)
    spec = local_spec(spec, parallel.layout)
    length = model.max_model_len if isinstance(model.max_model_len, int) else spec.max_position
    needs = partial(bytes_for, spec, cache.block_size, dtype, copies=copies, rooms=rooms)
    usable = needs(scheduler.max_num_seqs, length, scheduler, snapshots=cache.enable_prefix_caching)
    if device == "cpu":
        available = devices.available_memory()
        if available is None:
            return min(_CPU_CACHE_MOST, usable)
        available //= _sharers(parallel, device, host)
        share = int(max(available - weights - images, 0) * _CPU_CACHE_SHARE)
        one = needs(1, length, scheduler)
        return min(share, usable, max(_CPU_CACHE_MOST, one))
    total = devices.gpu_memory()
    if total is None:
        raise ConfigError(
            "the GPU's memory can't be read: set --kv-cache-memory, e.g. --kv-cache-memory 4G",
            param="--kv-cache-memory",
        )
    budget = int(total * cache.gpu_memory_utilization) // _sharers(parallel, device, host)
    left = budget - weights - images - activation_bytes(spec, dtype, scheduler)
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {cache.gpu_memory_utilization} is {show_bytes(budget)} of this GPU; "
            f"the weights take {show_bytes(weights)}, and the largest step and images "
            f"{show_bytes(budget - weights - left)}: raise it, or lower "
            "--max-num-batched-tokens or --max-num-seqs",
            param="--gpu-memory-utilization",
        )
    return min(left, usable)


def _sharers(parallel: ParallelSection, device: str, host: HostShare) -> int:
    """Ranks that share the memory of a device."""
    if device == "cpu":
        return host.ranks or parallel.ranks_here
    return sharers(parallel, devices.gpus(), host)


def _check_asked(asked: int, device: str, ranks: int) -> None:
    """``ranks``: that share the device's memory."""
    have = devices.available_memory() if device == "cpu" else devices.gpu_memory()
    shared = ""
    if have is not None and ranks > 1:
        have //= ranks
        shared = f" for each of {ranks} ranks"
    if have is not None and asked > have:
        raise ConfigError(
            f"--kv-cache-memory {show_bytes(asked)} is more than the {show_bytes(have)} that the device has"
            f"{shared}: set --kv-cache-memory to at most {show_bytes(have // 2)}",
            param="--kv-cache-memory",
        )


def choose_max_model_len(
    spec: ModelSpec,
    dtype: str,
    num_bytes: int,
    model: ModelSection,
    cache: CacheSection,
    scheduler: SchedulerSection,
    copies: int = 1,
    rooms: bool = False,
) -> int:
    """The context length: as asked, the model's own, or with ``auto`` the longest that the cache holds."""
    if isinstance(model.max_model_len, int):
        if model.max_model_len > spec.max_position:
            raise ConfigError(
                f"--max-model-len {model.max_model_len} is more than the model's {spec.max_position} "
                f"positions: set it to at most {spec.max_position}",
                param="--max-model-len",
            )
        return model.max_model_len
    if model.max_model_len is None:
        return spec.max_position
    longest = longest_that_fits(
        spec, cache.block_size, dtype, num_bytes, spec.max_position, scheduler, copies=copies, rooms=rooms
    )
    if longest < 1:
        if live_bytes(spec, dtype, scheduler):
            # This says more.
            pools_for(spec, cache.block_size, dtype, num_bytes, 1, scheduler, copies=copies, rooms=rooms)
        one = bytes_for(spec, cache.block_size, dtype, 1, 1, scheduler, copies=copies, rooms=rooms)
        raise ConfigError(
            f"--kv-cache-memory {show_bytes(num_bytes)} does not hold one block "
            f"(--block-size {cache.block_size}): set --kv-cache-memory to at least {show_bytes(one)}",
            param="--kv-cache-memory",
        )
    return longest
