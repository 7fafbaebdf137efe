"""Configuration of a server without a model: the engines play a script.

Only configuration, tokenizer and template of the checkpoint are read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config import hub
from weft.config.families import load_spec
from weft.config.families.tasks.pooling import overrides_of
from weft.config.names import accepted_names, served_names
from weft.config.resolve import check_checkpoint, check_files
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.sections.all import Config


def resolve_scripted(config: Config) -> EngineConfig:
    """Return the configuration for ``--scripted``. Raise ConfigError with flags that need a model."""
    scripted = config.front.scripted
    assert scripted is not None, "the caller asked for a script"
    _check_flags(config)
    if not Path(scripted).is_file():
        raise ConfigError(
            f"--scripted {scripted}: No such file; give the path of a script", param="--scripted"
        )
    check_files(config.runner, config.front, config.media)
    model = msgspec.structs.replace(config.model, load_format="dummy")
    path = hub.resolve_model_path(model.model, model.revision, load_format="dummy")
    tokenizer_path = hub.resolve_tokenizer_path(model.tokenizer, path)
    check_checkpoint(model, path, tokenizer_path)
    spec = load_spec(
        path,
        trust_remote_code=model.trust_remote_code,
        language_model_only=model.language_model_only,
        model_impl=model.model_impl,
        overrides=overrides_of(model),
    )
    if model.tokenizer is not None:  # another tokenizer has other end ids
        spec = msgspec.structs.replace(spec, eos_ids=())
    length = model.max_model_len if isinstance(model.max_model_len, int) else spec.max_position
    return EngineConfig(
        model_path=path,
        tokenizer_path=tokenizer_path,
        served_names=served_names(model, path),
        accepted_names=accepted_names(model, path),
        spec=spec,
        dtype="float32",
        device="cpu",
        model=model,
        cache=config.cache,
        scheduler=config.scheduler,
        runner=config.runner,
        kv=KVConfig(
            pools=(),
            block_size=config.cache.block_size,
            enable_prefix_caching=False,
            max_model_len=length,
            num_slots=config.scheduler.max_num_seqs,
        ),
        parallel=config.parallel,
        transfer=config.transfer,
        scripted=str(Path(scripted).resolve()),
    )


def _check_flags(config: Config) -> None:
    """Raise ConfigError for flags that need a model."""
    parallel, transfer = config.parallel, config.transfer
    given = {
        f"--tensor-parallel-size {parallel.tensor_parallel_size}": parallel.tensor_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        f"--hosts {parallel.hosts}": parallel.hosts > 1,
        f"--prefill {transfer.prefill} --decode {transfer.decode}": transfer.prefill or transfer.decode,
        f"--role {transfer.role}": transfer.role != "unified",
        f"--speculative-method {config.speculation.speculative_method}": config.speculation.drafts,
        "--kv-events-endpoint": config.events.kv_events_endpoint is not None,
    }
    for flags, wrong in given.items():
        if wrong:
            raise ConfigError(
                f"--scripted and {flags}: a scripted server runs no model; remove one of them",
                param="--scripted",
            )
