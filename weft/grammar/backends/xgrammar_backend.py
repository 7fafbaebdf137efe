"""Grammars by xgrammar: most of each mask is computed during the compile. Imports torch.

xgrammar enforces fewer keywords of JSON Schema (see ``narrow``). The library knows only an end token that no
model produces. An end id is allowed exactly where the grammar may end, or where the grammar itself spells
that token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.common.errors import ConfigError, InvalidRequest
from weft.grammar.backends.checks import check_tree
from weft.grammar.backends.lowering import Json, lower
from weft.grammar.backends.narrow import narrow
from weft.grammar.backends.rules import check_rules, is_gbnf
from weft.grammar.backends.structural import MARK, to_format
from weft.grammar.backends.vocabulary import Vocabulary, read_vocabulary
from weft.grammar.base import Matcher, fill_one_by_one
from weft.grammar.json_schema.keywords import XGRAMMAR
from weft.grammar.json_schema.schema import read_schema
from weft.text.tokenizer import Tokenizer
from weft.types.grammar import Grammar

try:
    import xgrammar
except ImportError:
    raise ConfigError(
        "--grammar-backend xgrammar needs the package xgrammar; install weft[xgrammar]",
        param="grammar_backend",
    ) from None

_MESSAGE_CHARS = 300
MAX_MASK_S = 0.2
"""Maximum CPU seconds of a grammar's first mask. The library has no limits, and a step waits for masks."""


class XgrammarCompiler:
    """The xgrammar ``GrammarCompiler``."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Give the library the tokens, with marked names for the control tokens and a spare id that ends an
        output.

        The library reads the whole vocabulary here.
        """
        self._vocabulary = vocabulary
        spare = vocabulary.spare()
        width = max(vocabulary.size, spare + 1)
        tokens = [*vocabulary.tokens, b""][:width]
        for text, number in vocabulary.controls.items():
            tokens[number] = b"\xff" + MARK.encode() + text.encode()
        info = xgrammar.TokenizerInfo(
            tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=width, stop_token_ids=[spare]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._known = frozenset(number for number, token in enumerate(tokens) if token)
        self._width = width

    def lower(self, grammar: Grammar) -> str:
        check_tree(grammar)
        controls = self._vocabulary.controls
        tag = to_format(lower(grammar, controls), controls, _json_format, _client_rules)
        return json.dumps({"type": "structural_tag", "format": tag})

    def build(self, source: str, nbytes: int = 0) -> XgrammarGrammar:
        """Return the compiled grammar; see ``GrammarCompiler.build``.

        Raises InvalidRequest for a grammar that does not compile, has no output, or has too slow masks.
        """
        try:
            compiled = self._compiler.compile_structural_tag(source)
        except RuntimeError as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {_plain(error)}") from None
        result = XgrammarGrammar(compiled, self._vocabulary, self._known, self._width)
        result.nbytes = nbytes
        _check_start(result, self._vocabulary.size)
        return result

    def compile(self, grammar: Grammar) -> XgrammarGrammar:
        return self.build(self.lower(grammar))


class XgrammarGrammar:
    """The xgrammar ``CompiledGrammar``. Outputs do not change a grammar."""

    nbytes = 0
    spent = False

    def __init__(self, compiled: Any, vocabulary: Vocabulary, known: frozenset[int], width: int) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._known = known
        self._width = width

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(
            xgrammar.GrammarMatcher(self._compiled), self._vocabulary, self._known, self._width
        )


class XgrammarMatcher:
    """The xgrammar ``Matcher``."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, known: frozenset[int], width: int) -> None:
        """``known``: ids of tokens with bytes. ``width``: number of ids in the library's masks."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._known = known
        self._width = width
        self._spare = vocabulary.spare()
        self._ends = 0
        """Number of end ids accepted at the end. The library's matcher does not see these ids."""

    def accept(self, token: int) -> bool:
        """Accept ``token`` and return True, or return False if the grammar refuses ``token``."""
        if self._ends == 0 and token in self._known and self._matcher.accept_token(token):
            return True
        if token in self._vocabulary.end_ids and (self._ends > 0 or self._matcher.is_completed()):
            self._ends += 1
            return True
        return False

    def rollback(self, tokens: int) -> None:
        ends = min(tokens, self._ends)
        self._ends -= ends
        if tokens > ends:
            self._matcher.rollback(tokens - ends)

    def fill(self, words: np.ndarray) -> None:
        """Overwrite ``words`` with the mask of the next token, one bit per id."""
        if self._ends > 0:
            words[:] = 0
        else:
            count = (self._width + 31) // 32
            direct = count == words.size and words.flags.c_contiguous
            row = words if direct else np.empty(count, np.int32)
            if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
                # False: every token is allowed.
                row[:] = -1
            if not direct:
                words[:] = row[: words.size]
            self._forbid_behind(words)
        if self._ends > 0 or self._matcher.is_completed():
            bits = words.view(np.uint32)
            for number in self._vocabulary.end_ids:
                bits[number // 32] |= np.uint32(1 << (number % 32))

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        return fill_one_by_one(matchers, words)

    def _forbid_behind(self, words: np.ndarray) -> None:
        """Clear, in place, the bits of the spare id and of all ids behind the spare id: the library leaves
        these bits undefined."""
        word, bit = divmod(self._spare, 32)
        if word < words.size:
            bits = words.view(np.uint32)
            bits[word] &= np.uint32((1 << bit) - 1)
            bits[word + 1 :] = 0

    @property
    def ended(self) -> bool:
        """True if the output is complete and only end ids may follow.

        Computes a mask unless an end id was accepted.
        """
        if self._ends > 0:
            return True
        if not self._matcher.is_completed():
            return False
        words = np.zeros((self._vocabulary.size + 31) // 32, np.int32)
        self.fill(words)
        bits = words.view(np.uint32)
        for number in self._vocabulary.end_ids:
            bits[number // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (number % 32)))
        return not bits.any()


def make_xgrammar(tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> XgrammarCompiler:
    """Make the compiler: see ``CompilerFactory``."""
    return XgrammarCompiler(read_vocabulary(Tokenizer.load(tokenizer), vocab_size, end_ids))


MAX_WHITE_SPACE = 17
"""Maximum characters between two parts of a JSON value that is not compact; see ``lark.WHITE_SPACE``."""


def _check_start(compiled: XgrammarGrammar, size: int) -> None:
    """Raise InvalidRequest for a grammar that no output satisfies, or with too slow masks."""
    words = np.zeros((size + 31) // 32, np.int32)
    matcher = compiled.matcher()
    start = time.thread_time()
    matcher.fill(words)
    if time.thread_time() - start > MAX_MASK_S:
        raise InvalidRequest("the grammar is too complex: computing a token mask takes too long")
    if not words.any():
        raise InvalidRequest("no output satisfies the grammar")


def _json_format(node: Json) -> dict[str, Any]:
    """Return the structural-tag format of a JSON value. Raises InvalidRequest."""
    schema = narrow(read_schema(node.schema, XGRAMMAR))
    if not node.compact:
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITE_SPACE}
    text = json.dumps(schema, ensure_ascii=False)
    if not text.isascii():
        # Separators can be set only through the library's text form of a grammar, which corrupts such
        # characters.
        raise InvalidRequest(
            "characters beyond ASCII in a schema of compact JSON are not supported by xgrammar"
        )
    try:
        grammar = xgrammar.Grammar.from_json_schema(
            text, any_whitespace=False, separators=(", ", ": "), strict_mode=False
        )
    except RuntimeError as error:
        raise InvalidRequest(f"the JSON schema cannot be compiled: {_plain(error)}") from None
    return {"type": "grammar", "grammar": str(grammar)}


def _client_rules(source: str) -> str:
    """Return a client's context-free grammar in GBNF. Raises InvalidRequest."""
    check_rules(source)
    if is_gbnf(source):
        return source
    try:
        return str(xgrammar.Grammar.from_lark(source))
    except RuntimeError as error:
        raise InvalidRequest(f"the grammar cannot be compiled: {_plain(error)}") from None


def _plain(error: Exception) -> str:
    """Return the library's message on one line, without source positions, at most ``_MESSAGE_CHARS``
    characters."""
    text = " ".join(str(error).split())
    return text.split(": ", 1)[-1][:_MESSAGE_CHARS]
