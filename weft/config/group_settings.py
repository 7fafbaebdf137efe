"""Settings with equal values on all ranks of a group. The settings affect messages, shapes or collectives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from weft import __version__
from weft.common.errors import ConfigError
from weft.config.resolved import EngineConfig
from weft.types import frames

#: Settings that may differ between ranks: file locations, host numbers, outputs.
_OWN = (
    "model_path",
    "tokenizer_path",
    "served_names",
    "accepted_names",
    "socket_folder",
    "model.model",
    "model.tokenizer",
    "model.revision",
    "model.served_model_name",
    "runner.trace",
    "runner.trace_requests",
    "runner.otlp_traces_endpoint",
    "runner.threads",
    "gpus",
    "parallel.group_secret",
    "parallel.advertise",
    "start_id",
    "address_file",
    "rendezvous",
    "host.ranks",
    "host.first",
    "host.gpus",
    "host.index",
)
_LONGEST = 120
"""Maximum length of a value; longer values are replaced by a hash."""


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """Return name -> value of all settings that must be equal on all ranks."""
    found: dict[str, str] = {"weft": __version__}
    facts = msgspec.to_builtins(config)
    if config.cache.kv_cache_memory is None:
        for pool in facts["kv"]["pools"]:
            del pool["num_blocks"]  # depends on free memory: ranks agree on the minimum
    _flatten(facts, "", found)
    return {name: value for name, value in found.items() if name not in _OWN}


def host_settings(config: EngineConfig) -> dict[str, str]:
    """Return name -> value of all settings that must be equal on all hosts of a group.

    Excludes the KV cache: each replica has a cache of the size for which its hosts have memory.
    """
    shared = {"version of frames": str(frames.VERSION), **shared_settings(config)}
    return {name: value for name, value in shared.items() if not name.startswith("kv.")}


def _flatten(value: Any, name: str, found: dict[str, str]) -> None:
    """Add ``value`` to ``found`` as text; add nested values under dotted names."""
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else key, found)
        return
    # Lists of objects, for example pools and cache groups, get one name per field.
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            _flatten(inner, f"{name}[{number}]", found)
        return
    text = json.dumps(value, sort_keys=True)
    if len(text) > _LONGEST:
        text = f"{len(text)} characters, blake2b {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    found[name] = text


def compare(ours: Mapping[str, str], theirs: Mapping[str, str], us: str, them: str) -> None:
    """Raise ConfigError with the first differing setting and both values.

    Return None if all are equal. ``us`` and ``them`` name the two sides in the message.
    """
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        mine = ours.get(name)
        other = theirs.get(name)
        if mine == other:
            continue
        section, _, field = name.rpartition(".")
        named = section in _SECTIONS or name == "kv.max_model_len"
        flag = f" (--{field.replace('_', '-')})" if named else ""
        raise ConfigError(
            f"{us} and {them} differ in {name}{flag}: {us} has {_show(mine)}, {them} has {_show(other)}",
            param=flag.strip(" ()") or None,
        )


def _show(value: str | None) -> str:
    """Return the value for a message."""
    return "no such setting" if value is None else value


_SECTIONS = (
    "model",
    "cache",
    "scheduler",
    "speculation",
    "runner",
    "parallel",
    "transfer",
    "media",
    "events",
)
