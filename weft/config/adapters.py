"""LoRA adapters as files: the folder that peft writes, its settings, its digest.

    adapter_config.json             settings; a setting that is not supported is refused by name
    adapter_model.safetensors       X.lora_A.weight [rank, inputs] and X.lora_B.weight [outputs, rank]

An adapter is identified by its content alone: ``digest`` covers both files. Names and paths never enter the
digest, so other content under the same name is another adapter. No torch here: only headers are parsed.

Source: Hu et al. 2021, arXiv 2106.09685; the rank-stabilized scale is Kalajdzievski 2023, arXiv 2312.03732.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.config.families.weight_files import read_header
from weft.types.adapters import DIGEST_DIGITS

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PIECE = 1 << 20
_SHOWN = 8
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_TENSOR = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
#: Settings without effect on the result of a saved adapter.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
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
    {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
)
#: Further settings whose values here have no effect. Any other value is refused.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"bias": ("none",)}
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
#: Initializations that replace the base weights: the saved matrices fit other base weights.
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """The two matrices of one adapted module of the base model."""

    module: str
    """Name of the module in the base model, as ``model.layers.0.self_attn.q_proj``."""
    rank: int
    inputs: int
    outputs: int
    scale: float
    """Factor of the product: alpha / rank, or alpha / sqrt(rank) for rank-stabilized adapters."""
    a: str
    b: str
    """Names of the tensors in the file: ``a`` [rank, inputs], ``b`` [outputs, rank]."""


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
    modules = _modules(read_header(weights), config, shown)
    most = max(module.rank for module in modules)
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
        return path.read_bytes()
    except OSError as error:
        raise _refused(name, f"{path.name} can't be read ({error.strerror})") from error


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


def _modules(header: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[AdapterModule, ...]:
    """Return the adapted modules. Raise ConfigError for tensors that are no pair of lora_A and lora_B."""
    # A pair of tensors per module; everything else is refused together.
    found = dict[str, dict[str, str]]()
    other = []
    for tensor in header:
        match = _TENSOR.match(tensor)
        if match is None:
            other.append(tensor)
        elif match["side"] in found.setdefault(match["module"], {}):
            other.append(f"{tensor} (twice)")
        else:
            found[match["module"]][match["side"]] = tensor
    other += [one["A" if "A" in one else "B"] for one in found.values() if len(one) == 1]
    if other:
        raise _refused(name, f"tensors that are not supported, or without a partner: {_listed(other)}")
    if not found:
        raise _refused(name, f"{WEIGHTS} has no tensors of an adapter")
    return tuple(
        _module(module, sides["A"], sides["B"], header, config, name)
        for module, sides in sorted(found.items())
    )


def _module(
    module: str, a: str, b: str, header: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> AdapterModule:
    """Return one module. Raise ConfigError if the shapes do not fit each other or the configured rank."""
    first, second = header[a]["shape"], header[b]["shape"]
    rank = _of_pattern(config, "rank_pattern", module, config.get("r"), name)
    alpha = _of_pattern(config, "alpha_pattern", module, config.get("lora_alpha"), name)
    if len(first) != 2 or len(second) != 2 or first[0] != second[1] or first[0] != rank:
        raise _refused(name, f"{module} has shapes {first} and {second}, and {CONFIG} says rank {rank}")
    kinds = {str(header[tensor]["dtype"]) for tensor in (a, b)}
    if not kinds <= _DTYPES:
        raise _refused(name, f"{module} has tensors of {', '.join(sorted(kinds))}; save them as bfloat16")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return AdapterModule(
        module=module, rank=first[0], inputs=first[1], outputs=second[0], scale=alpha / divisor, a=a, b=b
    )


def _of_pattern(config: Mapping[str, Any], field: str, module: str, default: Any, name: str) -> float:
    """Return the number for ``module``: of the first matching key of ``config[field]``, else ``default``.

    A key matches the whole name, or the end of the name after a dot, as a regular expression.
    """
    patterns = config.get(field) or {}
    value = default
    try:
        value = next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", module)), default)
    except (re.error, AttributeError) as error:
        raise _refused(name, f"{field} is not an object with regular expressions as keys") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _refused(name, f"{field if patterns else 'r or lora_alpha'} must be positive, not {value!r}")
    return value


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
