"""Typed reading of a checkpoint's ``config.json``, with range checks and errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.common.lfs import read_model_text

#: Field that changes results -> values without effect. If the family does not read the field, any other value
#: is refused by name: without the field the results would be wrong.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "attention_chunk_size": (None, 0),
    "no_rope_layers": (None, []),
    "shared_expert_intermediate_size": (None, 0),
    "num_shared_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "vision_config": (None, {}),
}

#: Maximum size in a configuration; a larger number means a damaged or hostile file.
MOST = 1 << 31
MOST_PARTS = 10_000
"""Maximum number of layers, or of experts."""

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
_SAME_DTYPE = {
    **{"half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"},
    **{"float": "float32", "fp32": "float32", "f32": "float32", "double": "float64"},
}
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in ``folder/name``, or None without such a file.

    Raise ConfigError for an unreadable or broken file, and for a Git LFS pointer.
    """
    path = folder / name
    if not path.is_file():
        return None
    text = read_model_text(path, "--model")
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} of model {folder.name!r} is not readable JSON: {error}", param="--model"
        ) from error
    if not isinstance(result, dict):
        raise ConfigError(f"{name} of model {folder.name!r} must hold a JSON object", param="--model")
    return result


class Facts:
    """Typed access to the fields of one ``config.json``. A missing or null field has the default value."""

    def __init__(
        self, config: Mapping[str, Any], weights: Sequence[str] | None = None, file: str = "config.json"
    ) -> None:
        """``weights``: tensor names of the checkpoint, None if unknown.

        ``file``: name of the file in errors.
        """
        self.file = file
        self._config = config
        self.weights = weights
        self._read: set[str] = set()
        self._given = tuple(config)
        """Fields of the file, without fields added by ``completed``."""

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def completed(self, defaults: Mapping[str, Any], renamed: Mapping[str, str]) -> Facts:
        """Return the fields under the names of ``renamed`` (old to new), completed by ``defaults``.

        The result keeps its own record of the fields read: its reader must refuse what is unread. Here all
        fields count as read. Raise ConfigError for a field with two values.
        """
        config = dict[str, Any]()
        for name, value in self._config.items():
            new = renamed.get(name, name)
            self._read.add(name)
            stated = config.get(new)
            if stated is not None and value is not None and stated != value:
                raise self.fail(name, f"= {value!r} contradicts the same field under another name")
            config[new] = stated if value is None else value
        result = Facts({**defaults, **config}, self.weights, self.file)
        result._given = tuple(config)
        return result

    def unread(self) -> dict[str, Any]:
        """Return the given fields that were not read, with their values."""
        return {name: self._config[name] for name in self._given if name not in self._read}

    def get(self, name: str) -> Any:
        """Return the raw value, or None if missing. Mark the field as read."""
        self._read.add(name)
        return self._config.get(name)

    def fail(self, name: str, problem: str) -> ConfigError:
        """Return the error for field ``name``; the caller raises the error."""
        return ConfigError(f"{self.file}: {name} {problem}", param="--model")

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MOST) -> int:
        """Return an integer from ``low`` to ``high``.

        Raise ConfigError, also for a missing field without default.
        """
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, "is missing")
        # A whole number written as a float, for example 2.0, is valid.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fail(name, f"must be an integer of at least {low}, not {value!r}")
        if value > high:
            raise self.fail(name, f"must be at most {high}, not {value}")
        return value

    def optional_integer(self, name: str, *, low: int = 1) -> int | None:
        """Return an integer like ``integer``, or None for a missing or null field."""
        return None if self.get(name) is None else self.integer(name, low=low)

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Return a finite number greater than ``above``. Raise ConfigError."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, "is missing")
        if (
            # bool is a subclass of int.
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= above
        ):
            raise self.fail(name, f"must be a number greater than {above:g}, not {value!r}")
        return float(value)

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        """Return a number like ``number``, or None for a missing or null field."""
        return None if self.get(name) is None else self.number(name, above=above)

    def has_weights(self, prefix: str, default: bool) -> bool:
        """Return True if a tensor's name begins with ``prefix``; ``default`` if the names are unknown."""
        if self.weights is None:
            return default
        return any(name.startswith(prefix) for name in self.weights)

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool; ``default`` for a missing or null field. Raise ConfigError for any other value."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"must be true or false, not {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the integers of a list or a single integer; () for a missing or null field.

        Raise ConfigError.
        """
        value = self.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.fail(name, f"must be an integer or a list of integers, not {value!r}")
        return tuple(values)

    def activation(self) -> str:
        """Return ``hidden_act`` under the name that ``layers`` uses. Raise ConfigError."""
        name = self.get("hidden_act") or "silu"
        name = _SAME_ACTIVATION.get(name, name) if isinstance(name, str) else name
        if name not in _ACTIVATIONS:
            raise self.fail("hidden_act", f"{name!r} is not supported; there are: {', '.join(_ACTIVATIONS)}")
        return str(name)

    def dtype(self) -> str | None:
        """Return the type of the saved weights, or None if not stated. Raise ConfigError."""
        value = self.get("dtype") or self.get("torch_dtype")
        name = str(value).removeprefix("torch.")
        # Not stated, or the type of quantized matrices: the saved type of the other tensors counts.
        if value in (None, "auto") or name.startswith("float8_"):
            return None
        name = _SAME_DTYPE.get(name.lower(), name)
        if name not in _DTYPES:
            raise self.fail("dtype", f"{name!r} is not supported; there are: {', '.join(_DTYPES)}")
        return name

    def refuse_unknown_computation(self) -> None:
        """Raise ConfigError for an unread field with an effect on results.

        Call after the family's reader: a family reads every implemented field, and each read is recorded.
        """
        for name, harmless in WITHOUT_EFFECT.items():
            value = self._config.get(name)
            if name not in self._read and not any(value == h and type(value) is type(h) for h in harmless):
                raise self.fail(name, f"= {value!r} is not supported by this version")
