"""LoRA adapters of ``LLM`` by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.common.errors import InvalidRequest
from weft.config.adapters import parse_modules, read_adapter
from weft.config.resolved import EngineConfig


def as_flags(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with a dict ``lora_modules`` (name -> folder) in the form of ``--lora-modules``."""
    modules = keywords.get("lora_modules")
    if not isinstance(modules, Mapping):
        return dict(keywords)
    values = [json.dumps({"name": str(name), "path": str(path)}) for name, path in modules.items()]
    return {**keywords, "lora_modules": values}


class Loras:
    """The adapters that the engine has loaded at the start."""

    def __init__(self, config: EngineConfig) -> None:
        """Read the digests. Raise ConfigError if a folder is no adapter."""
        modules = parse_modules(config.lora.lora_modules)
        self._digests = {name: read_adapter(folder, name).digest for name, folder in modules.items()}

    def digests(self, lora: str | Sequence[str | None] | None, count: int) -> list[str]:
        """Return the digest for each of ``count`` prompts; "" for the model alone.

        ``lora``: one name for all prompts, a list with one name or None per prompt, or None. Raise
        InvalidRequest for an unknown name, or a list of another length.
        """
        names: list[Any] = list(lora) if isinstance(lora, list | tuple) else [lora] * count
        if len(names) != count:
            raise InvalidRequest(f"there are {count} prompts but {len(names)} adapters", param="lora")
        # Every name is checked before the first prompt runs.
        for name in names:
            if name is not None and not (isinstance(name, str) and name in self._digests):
                known = ", ".join(self._digests) or "none"
                raise InvalidRequest(
                    f"there is no LoRA adapter {name!r}; lora_modules has: {known}", param="lora"
                )
        return ["" if name is None else self._digests[name] for name in names]
