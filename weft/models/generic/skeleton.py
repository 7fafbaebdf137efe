"""Models of transformers without memory: every parameter and buffer on the meta device.

The configuration comes from ``config.json``. Code inside a checkpoint never runs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weft.common.errors import ConfigError
from weft.config.families.facts import read_json
from weft.models.generic.interface import NAME, call_weft
from weft.models.generic.own_attention import replace_attention

_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.rand, torch.randn)


class _Dtype(TorchFunctionMode):
    """Default dtype of floating-point factories, for this thread only.

    ``torch.set_default_dtype`` would change other threads of the process.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        if func in _FACTORIES and given.get("dtype") is None and made.dtype == torch.float32:
            return func(*args, **{**given, "dtype": self._dtype})
        return made


def read_config(folder: str, layers: int | None = None) -> Any:
    """Return the configuration of transformers for the text model in ``folder``, cut to ``layers`` layers.

    Raises ConfigError if transformers has no such configuration.
    """
    fields = read_json(Path(folder), "config.json") or {}
    kind = str(fields.get("model_type"))
    try:
        config = CONFIG_MAPPING[kind].from_dict(_decoded(fields))
    except Exception as error:  # transformers raises many types for a bad field
        known = "" if isinstance(error, KeyError) else f": {error}"
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read config.json (model_type {kind!r}){known}",
            param="--model",
        ) from error
    if layers is not None:
        _cut(config.get_text_config(), layers)
    call_weft(config)
    return config


def _decoded(value: Any) -> Any:
    """Return config.json, or a field, without ``auto_map`` and with the numbers that JSON lacks:
    ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        # Code in a checkpoint stays unknown to transformers, in nested configurations as well.
        return {key: _decoded(inner) for key, inner in value.items() if key != "auto_map"}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _cut(config: Any, layers: int) -> None:
    """Keep the first ``layers`` layers in ``config``, in place. Lists with one entry per layer are cut."""
    before = config.num_hidden_layers
    if not 1 <= layers <= before:
        raise ConfigError(
            f"--num-hidden-layers-override must be between 1 and {before}",
            param="--num-hidden-layers-override",
        )
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def make_skeleton(config: Any, architecture: str, dtype: torch.dtype) -> Any:
    """Return the model ``architecture`` on the meta device. Parameters and buffers have ``dtype``.

    The model gets a copy of ``config``. Raises ConfigError if transformers has no such class, or if the
    class cannot be made.
    """
    cls = getattr(transformers, architecture, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ConfigError(
            f"transformers {transformers.__version__} has no model {architecture!r}", param="--model"
        )
    try:
        with torch.device("meta"), _Dtype(dtype):
            model = _made(cls, config)
    except Exception as error:  # modeling code raises many types
        raise ConfigError(
            f"transformers cannot make {architecture} from config.json: {error}", param="--model"
        ) from error
    call_weft(model.config)
    replace_attention(model)
    return model.eval()


def _made(cls: Any, config: Any) -> Any:
    """Return a model of ``cls`` with a copy of ``config``."""
    try:
        return cls(copy.deepcopy(config))
    except KeyError as error:
        if error.args != (NAME,):
            raise
    # The class has a table of attention modules by name of the attention function.
    named = copy.deepcopy(config)
    call_weft(named, "eager")
    return cls(named)


def base_of(model: Any) -> tuple[str, Any]:
    """Return (name, module) of the part of ``model`` below the head. Raises ConfigError."""
    name = model.base_model_prefix
    base = getattr(model, name, None) if name else None
    if isinstance(base, transformers.PreTrainedModel) and base is not model:
        return name, base
    inner = [
        (child, part)
        for child, part in model.named_children()
        if isinstance(part, transformers.PreTrainedModel)
    ]
    if len(inner) != 1:
        raise ConfigError(
            f"{type(model).__name__}: the generic backend needs one base model below the head",
            param="--model",
        )
    return inner[0]


def drop_head(model: Any) -> None:
    """Remove the output head of ``model``, in place: the checkpoint has none."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if head is not None and module is head:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, torch.nn.Identity())
