"""Facts of the served models in the form of Ollama's API."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Any

from weft.config.resolved import EngineConfig
from weft.config.sizing.memory import weight_bytes
from weft.front.first_request import takes_images
from weft.front.ollama import ollama_answers as o
from weft.front.requests.context import Front

FOR_EVER = 9_000_000_000.0
"""Time of the end of a model that stays loaded."""
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


@functools.lru_cache(maxsize=64)
def files_of(path: str) -> tuple[int, float, str]:
    """Return (bytes of the weights on disk, time of the last change, digest as 64 hex digits).

    The digest covers the configuration, and names and sizes of the weights.
    """
    folder = Path(path)
    digest = hashlib.blake2b(digest_size=32)
    size, changed = 0, 0.0
    for file in sorted({found for pattern in ("config.json", *_WEIGHTS) for found in folder.glob(pattern)}):
        facts = file.stat()
        changed = max(changed, facts.st_mtime)
        digest.update(f"{file.name}\0{facts.st_size}\0".encode())
        if file.suffix == ".json":
            digest.update(file.read_bytes())
        else:
            size += facts.st_size
    return size, changed or time.time(), digest.hexdigest()


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


def names_of(front: Front) -> list[str]:
    """Return the names of models and adapters."""
    return [*front.names, *front.adapters.names]


def tag_of(front: Front, name: str) -> o.OllamaModel:
    """Return the entry of a model in /api/tags."""
    size, changed, digest = files_of(front.config.model_path)
    return o.OllamaModel(
        name=name,
        model=name,
        modified_at=o.at_time(changed),
        size=size,
        digest=digest,
        details=details_of(front.config),
    )


def running_of(front: Front, name: str) -> o.OllamaRunning:
    """Return the entry of a loaded model in /api/ps."""
    size, _, digest = files_of(front.config.model_path)
    return o.OllamaRunning(
        name=name,
        model=name,
        size=size,
        digest=digest,
        details=details_of(front.config),
        expires_at=o.at_time(FOR_EVER),
        size_vram=0 if front.config.device == "cpu" else size,
        context_length=front.config.kv.max_model_len,
    )


def shown_of(front: Front) -> o.OllamaShown:
    """Return the answer of /api/show for the served model."""
    spec, config = front.config.spec, front.config
    family = spec.family
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": front.names[0],
        "general.parameter_count": parameters_of(config),
        f"{family}.context_length": config.kv.max_model_len,
        f"{family}.embedding_length": spec.hidden,
        f"{family}.vocab_size": spec.vocab_size,
    }
    return o.OllamaShown(
        template=front.text.chat.source or "",
        details=details_of(config),
        model_info=info,
        capabilities=_capabilities(front),
        modified_at=o.at_time(files_of(config.model_path)[1]),
    )


def _capabilities(front: Front) -> list[str]:
    spec, output = front.config.spec, front.text.output
    found = {
        "completion": spec.head,
        "embedding": not spec.pooled.refused,
        "vision": takes_images(front.config),
        "tools": output.declared is not None and output.declared.tells_calls,
        "thinking": bool(output.reasoning_end),
    }
    return [name for name, has in found.items() if has]
