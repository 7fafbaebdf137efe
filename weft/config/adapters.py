"""LoRA adapters as files: the folder that peft writes, its settings, its digest.

    adapter_config.json             settings; a setting that is not supported is refused by name
    adapter_model.safetensors       X.lora_A.weight [rank, inputs] and X.lora_B.weight [outputs, rank]

An adapter is identified by its content alone: ``digest`` covers both files. Names and paths never enter the
digest, so other content under the same name is another adapter. No torch here: only headers are parsed.

Source: Hu et al. 2021, arXiv 2106.09685; the rank-stabilized scale is Kalajdzievski 2023, arXiv 2312.03732.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.config.adapter_files.reading import MOST_SETTINGS, read_regular
from weft.config.adapter_files.tensors import AdapterModule, SavedMatrix, UnreadTensors, modules_of
from weft.config.families.weight_files import read_header
from weft.types.adapters import DIGEST_DIGITS

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PIECE = 1 << 20
#: Settings without effect on the result of a saved adapter.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # describes the layout of the base weight; A and B are stored in one layout
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "init_lora_weights",
        "modules_to_save",
        "target_parameters",
        "ensure_weight_tying",
    }
)
#: Further settings whose values here have no effect. Any other value is refused.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"bias": ("none",)}
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
#: Initializations that replace the base weights: the saved matrices fit other base weights.
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A checked adapter folder."""

    folder: str
    """Absolute path."""
    digest: str
    """32 hexadecimal digits."""
    nbytes: int
    """Size of the weights in the file."""
    rank: int
    """Largest rank of a module."""
    base: str
    """Base model as named by the adapter; "" if the adapter names none."""
    modules: tuple[AdapterModule, ...]
    """Modules in order of their names."""
    saved: tuple[SavedMatrix, ...] = ()
    """Whole matrices of ``modules_to_save``, in order of their names."""
    ties: bool = False
    """True if the adapter changes embedding and output head of a tied model alike."""

    @property
    def weights(self) -> Path:
        """Path of the file with the tensors."""
        return Path(self.folder) / WEIGHTS


def read_adapter(folder: str | Path, name: str = "", max_rank: int = 0, digest: str = "") -> AdapterFile:
    """Return the adapter in ``folder``. Reads both files completely, for the digest.

    ``name``: name for errors; default: the last part of the path. ``max_rank``: largest accepted rank; 0 for
    no limit. ``digest``: a digest that the caller has checked; then only the header of the weights is read.

    Raise ConfigError (param ``--lora-modules``) if a file is missing or damaged, or if a setting or a tensor
    is not supported. The message names every such setting, or the first tensors. The message contains no
    path.
    """
    # Settings come first: a setting explains a strange tensor better than the tensor's name.
    path = Path(folder).absolute()
    shown = name or path.name
    data = _bytes_of(path / CONFIG, shown)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(shown, f"{CONFIG} is not readable JSON") from error
    if not isinstance(config, dict):
        raise _refused(shown, f"{CONFIG} must hold a JSON object")
    _check_settings(config, shown)
    weights = path / WEIGHTS
    if not weights.is_file():
        pickled = " (pickles are not read; save the adapter as safetensors)"
        raise _refused(shown, f"{WEIGHTS} is missing{pickled if list(path.glob('*.bin')) else ''}")
    try:
        modules, saved = modules_of(read_header(weights), config)
    except UnreadTensors as error:
        raise _refused(shown, str(error)) from error
    most = max((module.rank for module in modules), default=0)
    if max_rank and most > max_rank:
        raise ConfigError(
            f"adapter {shown!r} has rank {most}, and --max-lora-rank is {max_rank}", param="--max-lora-rank"
        )
    base = config.get("base_model_name_or_path")
    return AdapterFile(
        folder=str(path),
        digest=digest or digest_of(data, weights),
        nbytes=weights.stat().st_size,
        rank=most,
        base=base if isinstance(base, str) else "",
        modules=modules,
        saved=saved,
        ties=bool(config.get("ensure_weight_tying")),
    )


def digest_of(config: bytes, weights: Path | bytes) -> str:
    """Return the digest over the bytes of both files, 32 hexadecimal digits. Raise OSError."""
    made = blake2b(b"adapter", digest_size=DIGEST_DIGITS // 2)
    made.update(len(config).to_bytes(8, "little") + config)
    if isinstance(weights, bytes):
        made.update(weights)
        return made.hexdigest()
    with weights.open("rb") as file:
        while piece := file.read(_PIECE):
            made.update(piece)
    return made.hexdigest()


def parse_modules(values: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return name -> folder of the values of ``--lora-modules``.

    A value is ``name=folder`` or a JSON object with ``name`` and ``path``. Raise ConfigError for any other
    value, and for a name that is given twice.
    """
    if isinstance(values, Mapping):
        return {str(name): str(folder) for name, folder in values.items()}
    found = dict[str, str]()
    for value in values:
        name, folder = _module_of(value)
        if not name or not folder:
            raise ConfigError(
                f"--lora-modules takes NAME=FOLDER, or a JSON object with name and path, not {value!r}",
                param="--lora-modules",
            )
        if name in found:
            raise ConfigError(f"--lora-modules has the name {name!r} twice", param="--lora-modules")
        found[name] = folder
    return found


def _module_of(value: str) -> tuple[str, str]:
    """Return (name, folder) of one value; ("", "") for an invalid value."""
    if not value.lstrip().startswith("{"):
        name, _, folder = value.partition("=")
        return name.strip(), folder.strip()
    try:
        made = json.loads(value)
    except ValueError:
        return "", ""
    name, folder = made.get("name"), made.get("path")
    return (name, folder) if isinstance(name, str) and isinstance(folder, str) else ("", "")


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"adapter {name!r}: {why}", param="--lora-modules")


def _bytes_of(path: Path, name: str) -> bytes:
    try:
        return read_regular(path, MOST_SETTINGS)
    except OSError as error:
        raise _refused(name, f"{path.name} can't be read ({error.strerror})") from error
    except ConfigError as error:
        raise _refused(name, error.message) from error


def _check_settings(config: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError that lists all settings which change the result and are not supported."""
    if config.get("peft_type") != "LORA":
        raise _refused(name, f"peft_type {config.get('peft_type')!r} is not supported, only LORA")
    wrong = [
        f"{key} {value!r}"
        for key, value in config.items()
        if key not in _HARMLESS
        and key not in _READ
        and value not in _WITHOUT_EFFECT.get(key, _NOTHING)
        and value not in _NOTHING
    ]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REPLACING):
        wrong.append(f"init_lora_weights {start!r} (its matrices fit changed base weights)")
    if wrong:
        raise _refused(name, f"settings that are not supported: {', '.join(wrong)}")
