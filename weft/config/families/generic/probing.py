"""Model specs for the generic backend: facts found by a probe in a process of its own. No torch here.

The probe needs torch and transformers, and this process may have neither. The result of a probe depends on
config.json and on the versions of Weft and transformers, so a spec is stored in the user's cache. A refusal
is not stored: a missing package may be the cause.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from weft import __version__
from weft.common import env
from weft.common.errors import ConfigError
from weft.common.folder import cache_folder
from weft.common.log import get_logger
from weft.common.registry import Registry
from weft.config.families.facts import Facts
from weft.config.families.generation import generation_ends
from weft.config.families.quantized import quantized_spec
from weft.config.families.weight_files import saved_dtype
from weft.config.flags import parse_size
from weft.config.spec import ModelSpec
from weft.types.pooled import PooledSpec

log = get_logger(__name__)

#: First supported version of transformers, and the first version beyond the tested versions.
OLDEST, BEYOND = (5, 17), (5, 24)
INSTALL = "pip install 'weft[models]'"
#: Endings of the names of causal models in transformers. The second ending belongs to older classes: GPT-2.
CAUSAL = ("ForCausalLM", "LMHeadModel")
_VERSION = 5
"""Version of the probe within one version of Weft."""
_SECONDS, _MEMORY = "600", "4GiB"
"""Default limits of a probe."""


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a probe: a spec, or the reason for a refusal."""

    spec: ModelSpec | None = None
    refused: str = ""
    lacks_memory: bool = False
    """True if the probe failed at its limit of memory."""


def memory_limit() -> int:
    """Return the bytes that a probe may allocate. Raise ConfigError for a bad WEFT_PROBE_MEMORY."""
    said = env.get("WEFT_PROBE_MEMORY", _MEMORY)
    return _positive("WEFT_PROBE_MEMORY", said, parse_size(said), _MEMORY)


def _seconds() -> int:
    """Return the seconds that a probe may take. Raise ConfigError for a bad WEFT_PROBE_SECONDS."""
    said = env.get("WEFT_PROBE_SECONDS", _SECONDS)
    return _positive("WEFT_PROBE_SECONDS", said, int(said) if said.isdecimal() else None, _SECONDS)


def _positive(name: str, said: str, value: int | None, example: str) -> int:
    """Return ``value``. Raise ConfigError unless ``said``, the text of variable ``name``, is positive."""
    if not value:
        raise ConfigError(f"{name}={said!r} must be positive, for example {example}", param=name)
    return value


def transformers_version() -> str | None:
    """Return the version of the installed transformers; None if transformers is not installed."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def serves(architecture: str, model_impl: str, families: Registry[Any]) -> bool:
    """Return True if the implementation of transformers serves ``architecture``.

    ``model_impl``: weft, transformers, or auto. ``families``: architectures with an own implementation. With
    auto and no own implementation: True, except for a name that transformers does not know either; the error
    then suggests names of ``families``.
    """
    if model_impl != "auto":
        return model_impl == "transformers"
    if architecture in families:
        return False
    # Without transformers, the error names the package. Transformers could serve a causal model alone.
    missing = transformers_version() is None and architecture.endswith(CAUSAL)
    return missing or is_known(architecture)


def is_known(architecture: str) -> bool:
    """Return True if the installed transformers has the causal model ``architecture``.

    Reads the source of the table of models: importing transformers would import torch.
    """
    if not architecture.endswith(CAUSAL):
        return False
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return False
    table = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        return f'"{architecture}"' in table.read_text(encoding="utf-8")
    except OSError:
        return True  # the probe will know


def load_spec(
    path: Path,
    facts: Facts,
    architecture: str,
    layers: int | None,
    mtp: int,
    pooled: PooledSpec,
    head: bool | None,
) -> ModelSpec:
    """Return the spec of the checkpoint in ``path``, complete. ``mtp``: modules wanted for drafts.

    ``pooled``: rules for embeddings of prompts. ``head``: False for a checkpoint without a saved output head,
    None for a classifier.
    ``facts``: config.json. Raise ConfigError.
    """
    if mtp:
        raise ConfigError(
            "--speculative-method mtp: the implementation of transformers has no multi-token prediction "
            "module; use --speculative-method ngram or none",
            param="--speculative-method",
        )
    spec = probed_spec(path, architecture, layers)
    nested = facts.get("text_config")
    text = Facts(nested if isinstance(nested, dict) else {})
    more = generation_ends(path)
    return msgspec.structs.replace(
        spec,
        eos_ids=tuple(sorted({i for i in spec.eos_ids + more if 0 <= i < spec.vocab_size})),
        pooled=pooled,
        head=bool(head or (spec.tied and head is not None)),
        dtype=facts.dtype() or text.dtype() or saved_dtype(path) or "float32",
        quantized=quantized_spec(facts, path) or quantized_spec(text, path),
    )


def check_settings(spec: ModelSpec, deterministic: bool) -> None:
    """Raise ConfigError for settings that the implementation of transformers cannot keep."""
    if spec.implementation == "transformers" and deterministic:
        raise ConfigError(
            f"--deterministic: {spec.architecture} is served with the implementation of transformers, where "
            "rows of a step may change the last bits of each other; remove --deterministic",
            param="--deterministic",
        )


def check_transformers(architecture: str) -> str:
    """Return the installed version of transformers.

    Raise ConfigError with the command that installs a supported version.
    """
    why = f"{architecture} is to run with the code of transformers (--model-impl)"
    version = transformers_version()
    wanted = f"transformers {'.'.join(map(str, OLDEST))} or newer, before {'.'.join(map(str, BEYOND))}"
    if version is None:
        raise ConfigError(
            f"{why}, and transformers is not installed: {INSTALL}",
            param="--model-impl",
        )
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < BEYOND:
        raise ConfigError(
            f"{why}, which needs {wanted}, not {version}: {INSTALL}",
            param="--model-impl",
        )
    return version


def probed_spec(folder: Path, architecture: str, layers: int | None) -> ModelSpec:
    """Return the spec of the checkpoint in ``folder`` for the class ``architecture`` of transformers.

    ``layers``: number of layers to keep, None for all. ``dtype`` of the spec is empty. Raise ConfigError.
    """
    version = check_transformers(architecture)
    content = (folder / "config.json").read_bytes()
    versions = f"{__version__}\0{_VERSION}\0{version}"
    key = hashlib.sha256(f"{versions}\0{architecture}\0{layers}\0".encode() + content)
    path = cache_folder("probes") / f"{key.hexdigest()[:32]}.json"
    found = _stored(path)
    if found is not None:
        return found
    probed = run_probe(folder, architecture, layers)
    if probed.spec is None:
        raise ConfigError(probed.refused, param="--model")
    _store(path, probed)
    return probed.spec


def run_probe(folder: Path, architecture: str, layers: int | None) -> Probed:
    """Run the probe in a process of its own. Raise ConfigError if the process fails."""
    command = [sys.executable, "-m", "weft.models.generic.probe", str(folder), architecture]
    command += [] if layers is None else [str(layers)]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    quiet["OMP_NUM_THREADS"] = "1"  # the pass computes nothing
    seconds, memory = _seconds(), memory_limit()
    log.info("probing %s with the modeling code of transformers", architecture)
    try:
        done = subprocess.run(
            command,
            env=env.with_changes(quiet),
            stdin=subprocess.DEVNULL,  # no library may wait for an answer
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        found = msgspec.json.decode(done.stdout, type=Probed)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the probe of {architecture} did not end within {seconds} s; set WEFT_PROBE_SECONDS to more "
            "seconds for a slow host",
            param="--model",
        ) from error
    except msgspec.MsgspecError as error:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"the probe of {architecture} failed: {last[:300]}", param="--model") from error
    if found.lacks_memory:
        raise ConfigError(
            f"the probe of {architecture} needs more than {memory / 2**20:g} MiB of memory; set "
            "WEFT_PROBE_MEMORY to a larger size",
            param="--model",
        )
    return found


def _stored(path: Path) -> ModelSpec | None:
    """Return the stored spec, or None if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Probed).spec
    except (OSError, msgspec.MsgspecError):
        return None


def _store(path: Path, found: Probed) -> None:
    """Store ``found`` at ``path`` atomically. A failure costs only the time of the next probe."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".making-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(found))
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning("the result of the probe cannot be stored in %s (%s)", path.parent, error.strerror)
