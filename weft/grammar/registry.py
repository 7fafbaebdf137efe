"""The grammar backends by name. Only the requested backend is imported."""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.registry import Registry
from weft.grammar.base import CompilerFactory, GrammarCompiler

backends: Registry[CompilerFactory] = Registry("grammar backend")
backends.add("llguidance", "weft.grammar.backends.llguidance_backend:make_llguidance")
backends.add("xgrammar", "weft.grammar.backends.xgrammar_backend:make_xgrammar")

DEFAULT = "llguidance"
"""The backend of ``auto``: see docs/adr/0022-grammar-backends.md."""


def resolved(name: str) -> str:
    """Return the backend's name, with ``auto`` resolved."""
    return DEFAULT if name == "auto" else name


def make_compiler(name: str, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarCompiler:
    """Return the compiler of backend ``name`` (or ``auto``) for the tokenizer in the folder ``tokenizer``.

    ``vocab_size``: width of the logits. ``end_ids``: tokens that may end an output. Raise ConfigError for an
    unknown name, or for a backend that is not installed.

    The API server always checks grammars with ``llguidance``, because llguidance needs no torch. The engines
    may use another backend.
    """
    return backends.get(resolved(name))(tokenizer, vocab_size, end_ids)
