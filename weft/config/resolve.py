"""From settings to an engine's configuration, in named steps, before anything starts.

Every step runs all checks possible at that point. A failed check raises ConfigError with the flags at fault
and values that would work. The result is frozen, without device, open file or torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from weft.common.cores import usable_cores
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config import devices, hub
from weft.config.cache_layout import exact_elements
from weft.config.expert_settings import check_experts
from weft.config.families import load_spec
from weft.config.families.facts import read_json
from weft.config.families.generation import check_generation_config
from weft.config.families.generic.probing import check_settings
from weft.config.families.rope_settings import fit_context
from weft.config.families.tasks.pooling import overrides_of
from weft.config.families.weight_files import check_weight_files, refuse_adapter
from weft.config.gpus import gpus_here, gpus_of_group
from weft.config.hosts import check_hosts, engines_on, refuse_hosts
from weft.config.names import accepted_names, served_names
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import (
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
from weft.config.sections.events_section import check_events
from weft.config.sections.front_section import check_front
from weft.config.sections.lora_section import check_lora
from weft.config.sections.media_section import check_media
from weft.config.sharding import local_spec
from weft.config.sizing.budget import check_budget, with_budget
from weft.config.sizing.cache_sizes import make_caches
from weft.config.sizing.draft import owner_of, with_draft
from weft.config.sizing.encoder import check_encoder, encoder_caches, encoder_spec
from weft.config.sizing.tier import check_tier
from weft.config.spec import ModelSpec
from weft.config.transfers import check_transfer
from weft.gguf.checkpoint_folder import gguf_files
from weft.tracing.push import check_endpoint

log = get_logger(__name__)

RANKS_EACH_CORE = 4
"""Maximum number of ranks per CPU core.

Each rank has its own thread and its own part of the model in memory.
"""


def resolve(config: Config, group: str = "", host: HostShare = HostShare()) -> EngineConfig:
    """Return the configuration of one engine.

    Downloads missing model files. Raise ConfigError; see the steps.

    ``group``: the group's name in a server of several groups. ``host``: the other groups on the host.
    """
    model, cache, runner, speculation = config.model, config.cache, config.runner, config.speculation
    check_runs_model(config.front)
    device = "cpu" if host.elsewhere else choose_device(runner)
    transfer = check_transfer(config.transfer, config.parallel)
    scheduler = with_depth(with_budget(config.scheduler, device, speculation.drafts), device)
    check_budget(scheduler, cache.block_size, speculation.drafts)
    check_files(runner, config.front, config.media)
    path = _folder(model)
    tokenizer_path = hub.resolve_tokenizer_path(model.tokenizer, path)
    check_checkpoint(model, path, tokenizer_path)
    check_ngram(speculation)
    check_grammar(config.grammar)
    check_lora(config.lora)
    check_events(config.events, host.first + max(engines_on(config.parallel, host.index), default=0))
    speculation, spec = drafted(config, read_spec(config, path), path)
    check_weight_files(Path(path), model.load_format, _prefixes(spec, transfer.role))
    # With several groups on the host, the topology checks the cores of all groups together.
    if not host.ranks:
        refuse_hosts(config.parallel)
        check_cores(config.parallel, device)
    here = () if host.elsewhere else gpus_here(config.parallel, device, host.index)
    host = msgspec.structs.replace(host, gpus=len(here)) if host.ranks else host
    gpus = gpus_of_group(here, config.parallel, host)
    dtype = choose_dtype(model, spec, device, path, host.elsewhere)
    if transfer.role == "encode":
        speculation = SpeculationSection()  # an encode group makes no tokens
        kv = encoder_caches(spec, dtype, config, host)
    else:
        kv = make_caches(spec, dtype, device, msgspec.structs.replace(config, scheduler=scheduler), host)
    return EngineConfig(
        model_path=path,
        tokenizer_path=tokenizer_path,
        served_names=served_names(model, path),
        accepted_names=accepted_names(model, path),
        spec=fit_context(spec, kv.max_model_len),
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
        events=config.events,
        lora=config.lora,
        tier=check_tier(config, device),
        gpus=gpus,
        group=group,
        host=host,
    )


def _folder(model: ModelSection) -> str:
    """Return the local folder of the model; download missing files. Raise ConfigError."""
    return hub.resolve_model_path(
        model.model, model.revision, load_format=model.load_format, model_impl=model.model_impl
    )


def drafted(config: Config, spec: ModelSpec, path: str) -> tuple[SpeculationSection, ModelSpec]:
    """Return (speculation with the local folder of the draft model, spec with the draft model). Both are
    unchanged without a draft model, and for an encode group. Raise ConfigError."""
    speculation, model = config.speculation, config.model
    if config.transfer.role == "encode":
        return speculation, spec
    draft = speculation.speculative_model
    if (speculation.speculative_method in ("draft", "eagle3")) != (draft is not None):
        raise ConfigError(
            "--speculative-model belongs to --speculative-method draft or eagle3: set both, or none",
            param="--speculative-model",
        )
    if draft is None:
        return speculation, spec
    try:
        folder = hub.resolve_model_path(draft, load_format=model.load_format)
        check_weight_files(Path(folder), model.load_format)
        spec = with_draft(spec, config, path, folder)
    except ConfigError as error:
        # The error of a file names no model, and there are two models.
        flag = "--speculative-model"
        said = error.message if "--speculative" in error.message else f"{flag} {draft}: {error.message}"
        raise ConfigError(said, param=flag) from None
    return msgspec.structs.replace(speculation, speculative_model=folder), spec


def _prefixes(spec: ModelSpec, role: str) -> tuple[str, ...]:
    """Return the name prefixes of all tensors that a group of ``role`` loads."""
    return spec.vision.published if role == "encode" and spec.vision is not None else ("",)


def read_spec(config: Config, path: str) -> ModelSpec:
    """Return the spec of the checkpoint in ``path``, adjusted to the group's settings. Raise ConfigError."""
    model, transfer = config.model, config.transfer
    encodes = transfer.role == "encode"
    read = partial(
        load_spec,
        path,
        model.num_hidden_layers_override,
        trust_remote_code=model.trust_remote_code,
        overrides=overrides_of(model),
        mtp=int(config.speculation.speculative_method == "mtp" and not encodes),
        model_impl=model.model_impl,
    )
    if encodes:
        check_encoder(config)
        check_hosts(config.parallel)
        return encoder_spec(read())
    if not model.language_model_only or transfer.take_embeddings:
        spec = read()
    else:
        spec = _text_spec(read, transfer.role == "decode")
    if transfer.take_embeddings and spec.vision is None:
        raise ConfigError(
            f"--take-embeddings: {spec.architecture} has no image input; remove --take-embeddings",
            param="--take-embeddings",
        )
    check_settings(spec, config.runner.deterministic)
    spec = check_experts(with_cache_dtype(spec, config.cache), config.parallel)
    local_spec(spec, check_hosts(config.parallel).layout)  # raises if the ranks do not divide the model
    return spec


def _text_spec(read: Callable[..., ModelSpec], decodes: bool) -> ModelSpec:
    """Return the spec for a group that runs no vision tower. Raise ConfigError.

    ``read``: reads the spec; takes ``language_model_only``. ``decodes``: True for a decode group. Prompts of
    a decode group may have images, so the spec keeps the vision part. If the vision part cannot be read, log
    the reason and return the spec without the vision part, as for every other group.
    """
    if decodes:
        try:
            return read()
        except ConfigError as error:
            log.info("this decode group accepts no prompts with images: %s", error.message)
    return read(language_model_only=True)


def with_depth(scheduler: SchedulerSection, device: str) -> SchedulerSection:
    """Return ``scheduler`` with the number of steps in flight: as set, or the default of ``device``."""
    if scheduler.steps_in_flight:
        return scheduler
    # On a CPU all threads compute, so planning in parallel takes as much time as it saves (docs/adr/0001).
    return msgspec.structs.replace(scheduler, steps_in_flight=2 if device == "cuda" else 1)


def with_cache_dtype(spec: ModelSpec, cache: CacheSection) -> ModelSpec:
    """Return ``spec`` with KV cache groups in the type of ``--kv-cache-dtype``.

    Raise ConfigError if none can change.
    """
    if cache.kv_cache_dtype == "auto":
        return spec
    caches = tuple(
        msgspec.structs.replace(kind, fp8=True, exact=exact_elements(kind, owner_of(kind, spec)))
        if kind.kind != "state" and kind.form in ("gqa", "latent", "sparse")
        else kind
        for kind in spec.caches
    )
    if caches == spec.caches:
        raise ConfigError(
            f"--kv-cache-dtype fp8: {spec.architecture} has no KV cache in 8 bits; use --kv-cache-dtype auto",
            param="--kv-cache-dtype",
        )
    return msgspec.structs.replace(spec, caches=caches)


def check_runs_model(front: FrontSection) -> None:
    """Raise ConfigError if --scripted is set: a scripted server has no engine
    (``weft.config.scripted_config``)."""
    if front.scripted is not None:
        raise ConfigError(
            "--scripted works only with `weft serve`, because a scripted server runs no model: remove "
            "--scripted",
            param="--scripted",
        )


def check_files(runner: RunnerSection, front: FrontSection, media: MediaSection) -> None:
    """Check that all files and folders named by settings can be opened later. Check the front and media
    sections.

    Raise ConfigError.
    """
    if front.chat_template is not None and not Path(front.chat_template).is_file():
        raise ConfigError(
            "--chat-template names no file: give the path of a Jinja template", param="--chat-template"
        )
    check_generation_config(front.generation_config)
    if runner.trace is not None:
        # The file need not exist, but its folder must.
        trace = Path(runner.trace)
        if trace.is_dir() or not trace.absolute().parent.is_dir():
            raise ConfigError("--trace must name a file in a folder that exists", param="--trace")
    for flag, name in (("--trace-requests", runner.trace_requests), ("--profile-dir", runner.profile_dir)):
        if name is not None and not (Path(name).is_dir() or Path(name).absolute().parent.is_dir()):
            raise ConfigError(
                f"{flag} must name a folder, or a new folder inside an existing folder", param=flag
            )
    if runner.otlp_traces_endpoint is not None:
        check_endpoint(runner.otlp_traces_endpoint)
    check_front(front)
    check_media(media)


def check_checkpoint(model: ModelSection, path: str, tokenizer_path: str) -> None:
    """Check that ``path`` is a checkpoint. Refuse code and pickles, unless allowed by the settings.

    Raise ConfigError.
    """
    refuse_adapter(Path(path))
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{model.model!r} is not a checkpoint that Weft can read: the folder has neither a "
            "config.json beside *.safetensors weights nor a *.gguf file",
            param="--model",
        )
    if not model.trust_remote_code:
        for folder, name in ((path, "config.json"), (tokenizer_path, "tokenizer_config.json")):
            if (read_json(Path(folder), name) or {}).get("auto_map"):
                raise ConfigError(
                    f"the checkpoint contains its own code (auto_map in {name}), which is refused; pass "
                    "--trust-remote-code if you trust the publisher",
                    param="--trust-remote-code",
                )
    if model.load_format == "dummy":
        return
    # Pickles can run code when loaded, so --load-format auto never reads pickles.
    safe = _has(path, "*.safetensors") or bool(gguf_files(Path(path)))
    pickles = _has(path, "*.bin") or _has(path, "*.pt") or _has(path, "*.pth")
    if model.load_format == "pickle":
        if not pickles:
            raise ConfigError(
                "--load-format pickle: the checkpoint has no *.bin, *.pt or *.pth file", param="--load-format"
            )
    elif not safe and pickles:
        raise ConfigError(
            "the checkpoint has only pickled weights, which can run code when loaded and are refused; "
            "pass --load-format pickle if you trust the publisher",
            param="--load-format",
        )
    elif not safe:
        raise ConfigError(
            "the checkpoint has no *.safetensors file: download the model again if the download is "
            "incomplete, pass --load-format pickle if the weights are pickles and you trust the publisher, "
            "or --load-format dummy for random weights",
            param="--load-format",
        )


def _has(folder: str, pattern: str) -> bool:
    """Return True if ``folder`` has a file that matches ``pattern``."""
    return any(Path(folder).glob(pattern))


def check_cores(parallel: ParallelSection, device: str) -> None:
    """Warn if this host has more ranks than usable CPU cores.

    Raise ConfigError above ``RANKS_EACH_CORE`` per core.
    """
    ranks = parallel.ranks_here
    cores = usable_cores()
    if device != "cpu" or ranks <= cores:
        return
    tensor = parallel.tensor_parallel_size
    data = parallel.data_parallel_size
    sizes = f"--tensor-parallel-size {tensor} x --data-parallel-size {data}"
    if ranks > RANKS_EACH_CORE * cores:
        raise ConfigError(
            f"{sizes}: {ranks} ranks are too many for the {cores} CPU cores of this process (at most "
            f"{RANKS_EACH_CORE} ranks per core): lower the product to at most "
            f"{RANKS_EACH_CORE * cores}",
            param="--data-parallel-size" if data > 1 else "--tensor-parallel-size",
        )
    log.warning("%s: %d ranks, with at least one thread each, share %d CPU cores", sizes, ranks, cores)


def choose_device(runner: RunnerSection) -> str:
    """Return "cuda" or "cpu". With ``auto``: "cuda" if torch can use a GPU. Raise ConfigError."""
    if runner.device == "cpu":
        return "cpu"
    if devices.gpu_memory() is not None:
        return "cuda"
    if runner.device == "cuda":
        why = "the installed torch is a CPU build" if devices.torch_is_cpu_only() else "no GPU was found"
        raise ConfigError(f"--device cuda: {why}; use --device cpu or auto", param="--device")
    return "cpu"


def check_ngram(speculation: SpeculationSection) -> None:
    """Raise ConfigError if the minimum n-gram length exceeds the maximum."""
    if speculation.ngram_min_length > speculation.ngram_max_length:
        raise ConfigError(
            f"--ngram-min-length {speculation.ngram_min_length} is more than --ngram-max-length "
            f"{speculation.ngram_max_length}",
            param="--ngram-min-length",
        )


def check_grammar(grammar: GrammarSection) -> None:
    """Raise ConfigError if the grammar backend is not installed."""
    if grammar.grammar_backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            "--grammar-backend xgrammar needs the package xgrammar; install weft[xgrammar]",
            param="grammar_backend",
        )


def choose_dtype(
    model: ModelSection, spec: ModelSpec, device: str, path: str, elsewhere: bool = False
) -> str:
    """Return the type of weights and cache: as set, or the checkpoint's type.

    Bundled models use float32 on a CPU by default. ``elsewhere``: True if the device is on another host.
    Raise ConfigError if the device has no products of ``--quantization`` in this type.
    """
    bundled = device == "cpu" and Path(path).resolve().is_relative_to(hub.BUNDLED)
    dtype = model.dtype if model.dtype != "auto" else "float32" if bundled else spec.dtype
    if not elsewhere:
        devices.check_products(model.quantization, device, dtype)
    return dtype
