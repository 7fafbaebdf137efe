"""The grammar backends, by name. Only the one that is asked for is imported."""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.registry import Registry
from weft.grammar.base import CompilerFactory, GrammarCompiler

backends: Registry[CompilerFactory] = Registry("grammar backend")
backends.add("llguidance", "weft.grammar.llguidance_backend:make_llguidance")
backends.add("xgrammar", "weft.grammar.xgrammar_backend:make_xgrammar")

DEFAULT = "llguidance"
"""What ``auto`` is: see docs/adr/0022-grammar-backends.md."""


def resolved(name: str) -> str:
    """The backend's own name for ``auto``."""
    return DEFAULT if name == "auto" else name


def make_compiler(name: str, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarCompiler:
    """The compiler of backend ``name`` (or ``auto``) for a tokenizer: see ``CompilerFactory``.

    The front takes ``llguidance`` to check grammars, whatever the heads use: it needs no torch.
    """
    return backends.get(resolved(name))(tokenizer, vocab_size, end_ids)
