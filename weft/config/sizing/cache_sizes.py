"""The caches of a group: bytes per rank, and the pools made from the bytes."""

from __future__ import annotations

from functools import partial

import msgspec

from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.flags import parse_size
from weft.config.gpus import sharers
from weft.config.resolved import HostShare, KVConfig
from weft.config.sections.all import CacheSection, Config, ModelSection, ParallelSection, SchedulerSection
from weft.config.sharding import local_spec
from weft.config.sizing.adapter_memory import adapter_bytes
from weft.config.sizing.media_limits import check_whole_images, embedding_bytes, media_limits
from weft.config.sizing.memory import (
    GIB,
    activation_bytes,
    bytes_for,
    live_bytes,
    longest_that_fits,
    pools_for,
    show_bytes,
    weight_bytes,
)
from weft.config.spec import ModelSpec

_CPU_CACHE_MOST = 4 * GIB
#: Default share of the memory left by the weights, for the cache on a CPU.
_CPU_CACHE_SHARE = 0.5


def make_caches(spec: ModelSpec, dtype: str, device: str, config: Config, host: HostShare) -> KVConfig:
    """Return the KV and image cache configuration of a rank. Raise ConfigError.

    ``spec``: the whole model. ``config``: with the chosen depth and token budget.
    """
    model, cache, scheduler, transfer = config.model, config.cache, config.scheduler, config.transfer
    copies = 1 + config.speculation.drafts
    transfers = transfer.role != "unified"
    parts = (model, cache, scheduler, copies)
    tower = not model.language_model_only
    loaded = spec if tower else msgspec.structs.replace(spec, vision=None)
    images = 0
    if tower or transfer.take_embeddings:
        longest = model.max_model_len if isinstance(model.max_model_len, int) else spec.max_position
        images = embedding_bytes(spec, dtype, longest, config.media, host=device == "cpu")
    layout, redundant = config.parallel.layout, config.parallel.redundant_experts
    adapters = adapter_bytes(spec, dtype, config.lora, layout, redundant)
    # Without a tower, no memory is planned for tower weights.
    num_bytes = cache_bytes(loaded, dtype, device, *parts, config.parallel, host, transfers, images, adapters)
    kv = divide_cache(local_spec(loaded, config.parallel.layout), dtype, num_bytes, *parts, transfers)
    limits = media_limits(
        spec, dtype, kv.max_model_len, config.media, tower=tower, takes=transfer.take_embeddings
    )
    if limits is not None and limits.takes and transfer.shard_embeddings != "off":
        limits = msgspec.structs.replace(limits, shards=config.parallel.layout.tensor > 1)
    check_whole_images(limits, scheduler, kv, config.runner.attention_backend)
    return msgspec.structs.replace(kv, media=limits)


def divide_cache(
    spec: ModelSpec,
    dtype: str,
    num_bytes: int,
    model: ModelSection,
    cache: CacheSection,
    scheduler: SchedulerSection,
    copies: int,
    transfers: bool,
) -> KVConfig:
    """Return the pools that a rank makes of ``num_bytes``, with the context length. Raise ConfigError.

    ``spec``: the share of one rank. ``transfers``: see ``bytes_for``.
    """
    max_model_len = choose_max_model_len(spec, dtype, num_bytes, model, cache, scheduler, copies, transfers)
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
            transfers=transfers,
        ),
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        max_model_len=max_model_len,
        num_slots=scheduler.max_num_seqs * scheduler.steps_in_flight,
        copies=copies,
    )


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
    transfers: bool = False,
    images: int = 0,
    adapters: int = 0,
) -> int:
    """Return the bytes for a rank's cache pools: as set, or the free memory up to the need of all sequences.

    Ranks on one CPU or one GPU share its memory evenly. On a GPU the default is a first division from
    estimates. The engine divides again, with ``pools_for``, after the weights are loaded.

    ``spec``: the whole model. ``copies``: copies of the recurrent state per slot. ``transfers``: see
    ``bytes_for``. ``images``: of the embedding cache. ``adapters``: ``adapter_bytes``. Raise ConfigError.
    """
    weights = planned_weights(spec, dtype, device, model, parallel)
    ranks = ranks_on_device(parallel, device, host)
    check_weights(weights, spec, dtype, device, model, parallel, ranks, host.elsewhere)
    if cache.kv_cache_memory is not None:
        asked = parse_size(cache.kv_cache_memory)
        assert asked is not None, "checked when the flag was parsed"
        _check_asked(asked, device, ranks, host.elsewhere)
        return asked
    spec = local_spec(spec, parallel.layout)
    length = model.max_model_len if isinstance(model.max_model_len, int) else spec.max_position
    needs = partial(bytes_for, spec, cache.block_size, dtype, copies=copies, transfers=transfers)
    usable = needs(scheduler.max_num_seqs, length, scheduler, snapshots=cache.enable_prefix_caching)
    if device == "cpu":
        available = None if host.elsewhere else devices.available_memory()
        if available is None:
            return min(_CPU_CACHE_MOST, usable)
        available //= ranks
        # At most half of the memory that weights leave, and at most 4 GiB unless one full sequence needs
        # more.
        share = int(max(available - weights - images - adapters, 0) * _CPU_CACHE_SHARE)
        one = needs(1, length, scheduler)
        return min(share, usable, max(_CPU_CACHE_MOST, one))
    total = devices.gpu_memory()
    if total is None:
        raise ConfigError(
            "the GPU's memory can't be read: set --kv-cache-memory, e.g. --kv-cache-memory 4G",
            param="--kv-cache-memory",
        )
    budget = int(total * cache.gpu_memory_utilization) // ranks
    left = budget - weights - images - adapters - activation_bytes(spec, dtype, scheduler)
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {cache.gpu_memory_utilization} is {show_bytes(budget)} of this "
            f"GPU; the weights take {show_bytes(weights)}, and the largest step, adapters and images "
            f"{show_bytes(budget - weights - left)}: raise --gpu-memory-utilization, or lower "
            "--max-num-batched-tokens or --max-num-seqs",
            param="--gpu-memory-utilization",
        )
    return min(left, usable)


def planned_weights(
    spec: ModelSpec, dtype: str, device: str, model: ModelSection, parallel: ParallelSection
) -> int:
    """Return the bytes of a rank's share of the weights: see ``weight_bytes``. ``spec``: the whole model."""
    packed = _stays_packed(spec, dtype, device)
    kind, extra = model.quantization, parallel.redundant_experts
    return weight_bytes(spec, dtype, kind, parallel.layout, extra, packed=packed)


def check_weights(
    weights: int,
    spec: ModelSpec,
    dtype: str,
    device: str,
    model: ModelSection,
    parallel: ParallelSection,
    ranks: int,
    elsewhere: bool = False,
) -> None:
    """Raise ConfigError if a rank's ``weights`` (bytes) exceed the memory of its device.

    ``elsewhere``: True if the device is on another host, so that nothing is known.
    ``ranks``: number of ranks that share the device's memory. On a CPU ``--quantization`` first loads the
    unrounded weights, which then count.
    """
    # ``until`` and ``way`` are parts of the message: the reason for the size, and a smaller checkpoint.
    until, way = "", "that is published quantized" if spec.quantized is None else "quantized to fewer bits"
    if device == "cpu" and model.quantization != "none" and model.load_format != "dummy":
        whole = msgspec.structs.replace(model, quantization="none")
        weights = planned_weights(spec, dtype, device, whole, parallel)
        until = " until --quantization has quantized them"
    elif device != "cpu" and model.quantization == "none":
        way += " or --quantization int4"
    have = devices.available_memory() if device == "cpu" else devices.gpu_memory()
    if elsewhere or have is None or weights <= have // ranks:
        return
    where = "this machine" if device == "cpu" else "a GPU"
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    raise ConfigError(
        f"the model's weights need {show_bytes(weights)} of memory{until}, and {where} has "
        f"{show_bytes(have // ranks)} available{each}: use a checkpoint {way}, divide the model among "
        "more devices or hosts (--tensor-parallel-size), or use a smaller model",
        param="--model",
    )


def _stays_packed(spec: ModelSpec, dtype: str, device: str) -> bool:
    """Return True if matrices published in quantized form are never dequantized (``loader.keeps_codes``)."""
    if device == "cpu" or spec.quantized is None:
        return device == "cpu"
    return spec.quantized.method != "gguf" and dtype != "float64" and devices.has_triton()


def ranks_on_device(parallel: ParallelSection, device: str, host: HostShare) -> int:
    """Return the number of ranks that share the memory of a device."""
    if device == "cpu":
        return host.ranks or parallel.ranks_here
    return sharers(parallel, devices.gpus(), host)


def _check_asked(asked: int, device: str, ranks: int, elsewhere: bool) -> None:
    """Raise ConfigError if --kv-cache-memory exceeds a rank's memory.

    ``ranks``: ranks that share the device. ``elsewhere``: see ``check_weights``.
    """
    if elsewhere:
        return
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
    transfers: bool = False,
) -> int:
    """Return the context length: as set, the model's own, or with ``auto`` the longest that fits the cache.

    Raise ConfigError.
    """
    if isinstance(model.max_model_len, int):
        if model.max_model_len > spec.max_position:
            raise ConfigError(
                f"--max-model-len {model.max_model_len} is more than the model's {spec.max_position} "
                f"positions: set --max-model-len to at most {spec.max_position}",
                param="--max-model-len",
            )
        return model.max_model_len
    if model.max_model_len is None:
        return spec.max_position
    longest = longest_that_fits(
        spec,
        cache.block_size,
        dtype,
        num_bytes,
        spec.max_position,
        scheduler,
        copies=copies,
        transfers=transfers,
    )
    if longest < 1:
        if live_bytes(spec, dtype, scheduler):
            # With recurrent states pools_for raises the better error.
            pools_for(
                spec, cache.block_size, dtype, num_bytes, 1, scheduler, copies=copies, transfers=transfers
            )
        one = bytes_for(spec, cache.block_size, dtype, 1, 1, scheduler, copies=copies, transfers=transfers)
        raise ConfigError(
            f"--kv-cache-memory {show_bytes(num_bytes)} does not hold one block "
            f"(--block-size {cache.block_size}): set --kv-cache-memory to at least {show_bytes(one)}",
            param="--kv-cache-memory",
        )
    return longest
