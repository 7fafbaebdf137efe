"""Weft: an LLM serving engine. ``from weft import LLM, AsyncLLM, SamplingParams``.

Public names are imported on first use. So processes without torch never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.api.async_llm import AsyncLLM
    from weft.api.llm import LLM
    from weft.api.request_outputs import RequestOutput
    from weft.types.sampling import SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "weft.api.llm",
    "AsyncLLM": "weft.api.async_llm",
    "RequestOutput": "weft.api.request_outputs",
    "SamplingParams": "weft.types.sampling",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Raise AttributeError for any other name."""
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    result = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = result
    return result


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
