"""Small tokenizers of three types, and grammars tried on their tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from weft.common.errors import InvalidRequest
from weft.config.hub import BUNDLED
from weft.grammar.base import CompiledGrammar, GrammarCompiler, Matcher
from weft.grammar.registry import make_compiler
from weft.text.tokenizer import Tokenizer
from weft.types.grammar import Grammar, JsonSchema

BACKENDS = ["llguidance", "xgrammar"]
KINDS = ["bundled", "level", "fallback"]
MARKUP = ["<|start|>", "<|end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@cache
def folder(kind: str) -> Path:
    """Return a tokenizer folder: the bundled model's, byte-level BPE, or BPE with byte fallback.

    The made tokenizers contain ``MARKUP``: the first two tokens are special, the rest only added.
    """
    if kind == "bundled":
        return BUNDLED / "spool-text"
    path = Path(mkdtemp())
    library = _level() if kind == "level" else _fallback()
    library.add_special_tokens(MARKUP[:2])
    library.add_tokens(MARKUP[2:])
    library.save(str(path / "tokenizer.json"))
    return path


def _level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    source = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    library.train_from_iterator(source, trainer)
    return library


def _fallback() -> Library:
    """As in sentencepiece: a blank is ``▁``, and bytes have tokens where characters have none."""
    chars = [chr(code) for code in range(33, 127)] + ["▁"]
    words = ["▁t", "he", "▁the", '":', "in", "te", "ge", "r"]
    vocab = {text: n for n, text in enumerate([f"<0x{b:02X}>" for b in range(256)] + chars + words[:-1])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ('"', ":"), ("i", "n"), ("t", "e"), ("g", "e")]
    library = Library(models.BPE(vocab, merges, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return library


class Rig:
    """A backend with a tokenizer. ``extra`` is the excess width of the logits over the tokenizer."""

    def __init__(self, backend: str, kind: str = "level", extra: int = 0) -> None:
        if backend == "xgrammar":
            pytest.importorskip("xgrammar")
        self.tokenizer = Tokenizer.load(folder(kind))
        self.size = self.tokenizer.vocab_size + extra
        special = self.tokenizer.special
        self.ends = (0, 2) if kind == "bundled" else (special["<|end|>"], special["<|start|>"])
        self.compiler: GrammarCompiler = make_compiler(backend, str(folder(kind)), self.size, self.ends)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text; markup becomes its own token."""
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return self.compiler.compile(grammar)

    def mask(self, matcher: Matcher) -> set[int]:
        """Return the ids that ``fill`` allows."""
        words = np.full((self.size + 31) // 32, -1, np.int32)
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def takes(self, compiled: CompiledGrammar, text: str) -> bool:
        """Return True if ``text`` is a complete output. Assert that masks agree."""
        matcher = compiled.matcher()
        for token in self.ids(text):
            allowed = token in self.mask(matcher)
            assert matcher.accept(token) == allowed, (text, token)
            if not allowed:
                return False
        ends = set(self.ends) & self.mask(matcher)
        assert ends in (set(), set(self.ends))
        assert matcher.accept(self.ends[0]) == bool(ends)
        return bool(ends)

    def check(self, grammar: Grammar, good: list[str], bad: list[str]) -> None:
        """Assert that all of ``good`` and none of ``bad`` are outputs of the grammar."""
        compiled = self.compile(grammar)
        assert [text for text in good if not self.takes(compiled, text)] == []
        assert [text for text in bad if self.takes(compiled, text)] == []

    def refusal(self, grammar: Grammar) -> str:
        """Return the message of the grammar's 400."""
        with pytest.raises(InvalidRequest) as error:
            self.compile(grammar)
        return error.value.message


def schema(value: object, *, compact: bool = False) -> JsonSchema:
    return JsonSchema(schema=json.dumps(value), compact=compact)
