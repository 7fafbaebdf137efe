"""Facts of the served models in the form of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.resolved import EngineConfig
from weft.config.sizing.memory import weight_bytes
from weft.front.first_request import takes_images
from weft.front.ollama import ollama_answers as o
from weft.front.requests.context import Front
from weft.front.requests.model_files import files_of
from weft.front.requests.models.several_models import ModelPlan
from weft.front.requests.setup import TextSetup
from weft.text.model import TextModel

FOR_EVER = 9_000_000_000.0
"""Time of the end of a model that stays loaded."""


def details_of(config: EngineConfig) -> o.OllamaDetails:
    """Return the format and the size of a model."""
    spec = config.spec
    gguf = any(Path(config.model_path).glob("*.gguf"))
    quantized = None if spec.quantized is None else spec.quantized.method
    chosen = config.model.quantization
    level = (quantized or spec.dtype) if chosen == "none" else chosen
    return o.OllamaDetails(
        format="gguf" if gguf else "safetensors",
        family=spec.family,
        families=[spec.family],
        parameter_size=_parameters_text(parameters_of(config)),
        quantization_level=level.upper(),
    )


def parameters_of(config: EngineConfig) -> int:
    """Return the number of parameters, from the shapes of the model."""
    return weight_bytes(config.spec, "bfloat16", "none") // 2


def _parameters_text(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


class ListedModel(NamedTuple):
    """One model of the server."""

    config: EngineConfig
    names: list[str]
    """Names of the model and of its adapters."""
    loaded: bool = True
    expires_in: float | None = None
    """Seconds until the unload if no request comes; None for never, and for a model in use."""


def models_of(front: Front, client: int) -> list[ListedModel]:
    """Return all models for an API key. ``client``: number of the key."""
    if front.several is None:
        return [ListedModel(front.config, [*front.names, *front.adapters.names])]
    found = []
    shown = set(front.several.shown(client))
    for status in (one for one in front.several.listed(client) if one.name in shown):
        model = front.several.loaded_as(status.name)
        adapters = () if model is None else model.adapters.names
        config = front.several.plan_of(status.name, client).config
        # The state, not the connection of this API server: all API servers must give the same answer.
        held = status.state in ("loaded", "draining")
        found.append(ListedModel(config, [status.name, *adapters], held, status.expires_in))
    return found


def tag_of(config: EngineConfig, name: str) -> o.OllamaModel:
    """Return the entry of a model in /api/tags."""
    size, changed, digest = files_of(config.model_path)
    return o.OllamaModel(
        name=name,
        model=name,
        modified_at=o.at_time(changed),
        size=size,
        digest=digest,
        details=details_of(config),
    )


def running_of(config: EngineConfig, name: str, expires_in: float | None = None) -> o.OllamaRunning:
    """Return the entry of a loaded model in /api/ps. ``expires_in``: seconds until the unload; None for
    never."""
    size, _, digest = files_of(config.model_path)
    return o.OllamaRunning(
        name=name,
        model=name,
        size=size,
        digest=digest,
        details=details_of(config),
        expires_at=o.at_time(FOR_EVER if expires_in is None else time.time() + expires_in),
        size_vram=0 if config.device == "cpu" else size,
        context_length=config.kv.max_model_len,
    )


def shown_of(config: EngineConfig, text: TextModel) -> o.OllamaShown:
    """Return the answer of /api/show for a model. ``text``: text model of the model."""
    spec = config.spec
    family = spec.family
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": config.served_names[0],
        "general.parameter_count": parameters_of(config),
        f"{family}.context_length": config.kv.max_model_len,
        f"{family}.embedding_length": spec.hidden,
        f"{family}.vocab_size": spec.vocab_size,
    }
    return o.OllamaShown(
        template=text.chat.source or "",
        details=details_of(config),
        model_info=info,
        capabilities=_capabilities(config, text),
        modified_at=o.at_time(files_of(config.model_path)[1]),
    )


class ShownModels:
    """Answers of /api/show for a server of several models. Used from one event loop."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._made: dict[str, tuple[str, o.OllamaShown]] = {}
        """Name -> (digest of the files, answer)."""
        self._lock = asyncio.Lock()

    async def of(self, plan: ModelPlan) -> o.OllamaShown:
        """Return the answer for a model, loaded or not. The tokenizer of a model is loaded once for the
        answer, and one at a time: the threads also read all requests."""
        name = plan.facts.name
        async with self._lock:
            digest = (await self._front.in_thread(files_of, plan.config.model_path))[2]
            if name not in self._made or self._made[name][0] != digest:
                text = await self._front.in_thread(TextSetup.of(plan.config, plan.section).load)
                self._made[name] = digest, shown_of(plan.config, text)
        return self._made[name][1]


def _capabilities(config: EngineConfig, text: TextModel) -> list[str]:
    spec, output = config.spec, text.output
    found = {
        "completion": spec.head,
        "embedding": not spec.pooled.refused,
        "vision": takes_images(config),
        "tools": output.declared is not None and output.declared.tells_calls,
        "thinking": bool(output.reasoning_end),
    }
    return [name for name, has in found.items() if has]
