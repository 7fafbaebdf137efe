"""Grammars by llguidance: masks are computed token by token from a prefix tree, without precomputed tables.

The library knows only an end token that no model produces. This module decides the ends of turns: an end id
is allowed exactly where the grammar may end, or where the grammar itself spells the token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import llguidance
import numpy as np
from llguidance import TokenizerWrapper

from weft.common.errors import InvalidRequest
from weft.grammar.backends.checks import check_tree
from weft.grammar.backends.lark import to_lark
from weft.grammar.backends.lowering import lower
from weft.grammar.backends.vocabulary import Vocabulary, read_vocabulary
from weft.grammar.base import Matcher
from weft.text.tokenizer import Tokenizer
from weft.types.grammar import Grammar

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
"""Limits of a compile, of a matcher's memory and of the time of one mask."""
_MESSAGE_CHARS = 300
_FULL = "too many states"
"""Part of the library's message for a lexer with ``max_lexer_states`` states."""
LEXER_TOKENS = 4096
"""After this many output tokens, a lexer is not shared with new matchers."""
TOKEN_BYTES = 6 << 10
"""Approximate growth of a lexer per token, for an output as random as a pattern allows."""
LEXER_BYTES = 50 << 20
"""Approximate size of a lexer with the maximum number of states."""
RENEW_S = 0.05
"""Maximum CPU seconds of a compile during a step."""


class _Tokens:
    """The tokenizer interface of llguidance."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Copy the tokens, with names for the control tokens and for the spare id that ends an output.

        Control tokens and the spare id are special.
        """
        spare = vocabulary.spare()
        tokens = [*vocabulary.tokens, b""][: max(vocabulary.size, spare + 1)]
        tokens[spare] = b"end of output"
        for text, number in vocabulary.controls.items():
            tokens[number] = text.encode()
        self.tokens = tokens
        self.special_token_ids = sorted({spare, *vocabulary.controls.values()})
        self.eos_token_id = spare
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("grammars contain bytes and ids: no text needs encoding")


class LlguidanceCompiler:
    """The llguidance ``GrammarCompiler``."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens = llguidance.LLTokenizer(cast(TokenizerWrapper, _Tokens(vocabulary)))
        self._spare = vocabulary.spare()

    def lower(self, grammar: Grammar) -> str:
        check_tree(grammar)
        return to_lark(lower(grammar, self._vocabulary.controls), self._vocabulary.controls)

    def build(self, source: str, nbytes: int = 0) -> LlguidanceGrammar:
        """Return the compiled grammar; see ``GrammarCompiler.build``.

        Only a fast compile allows private lexers later. Raises InvalidRequest for a grammar that does not
        compile or has no output.
        """
        begin = time.thread_time()
        made = LlguidanceGrammar(self.lexer(source), self._vocabulary, self._tokens.vocab_size, self._spare)
        made.check_start()
        made.compiled_bytes = nbytes
        # Only a cheap grammar may be compiled again while a step waits.
        if time.thread_time() - begin <= RENEW_S:
            made.renew = lambda: self.lexer(source)
        return made

    def compile(self, grammar: Grammar) -> LlguidanceGrammar:
        return self.build(self.lower(grammar))

    def lexer(self, source: str) -> llguidance.LLMatcher:
        """Return a matcher at the start of an output, with a lexer shared with no other matcher. Raises
        InvalidRequest."""
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be compiled: {_plain(matcher.get_error())}")
        return matcher


class LlguidanceGrammar:
    """The llguidance ``CompiledGrammar``.

    All matchers share one lexer. Masks add states to the lexer, and the library enforces a limit of states.
    Therefore a lexer is not shared with new matchers after ``LEXER_TOKENS`` tokens. A matcher with a full
    lexer continues with a new lexer of its own, whichever output filled the shared lexer.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, width: int, spare: int) -> None:
        """``matcher`` is the prototype that new matchers copy.

        ``width`` and ``spare``: see LlguidanceMatcher.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._width = width
        self._spare = spare
        self.compiled_bytes = 0
        """Bytes measured after the compile."""
        self.tokens = 0
        """Tokens accepted by all matchers."""
        self.full = False
        """True once a matcher found the lexer full."""
        self.renew: Callable[[], llguidance.LLMatcher] | None = None
        """Makes a private lexer for a matcher; None if a step cannot wait for the compile."""

    @property
    def nbytes(self) -> int:
        return self.compiled_bytes + min(self.tokens * TOKEN_BYTES, LEXER_BYTES)

    @property
    def spent(self) -> bool:
        return self.full or self.tokens >= LEXER_TOKENS

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._vocabulary, self._width, self._spare, self)

    def check_start(self) -> None:
        """Raise InvalidRequest for a grammar that no output satisfies. Computes the first mask, which later
        matchers reuse."""
        words = np.zeros((self._vocabulary.size + 31) // 32, np.int32)
        LlguidanceMatcher(self._matcher, self._vocabulary, self._width, self._spare).fill(words)
        if not words.any():
            raise InvalidRequest("no output satisfies the grammar")


class LlguidanceMatcher:
    """The llguidance ``Matcher``."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        width: int,
        spare: int,
        grammar: LlguidanceGrammar | None = None,
    ) -> None:
        """``width``: number of token ids in the library's masks. ``spare``: the id that ends an output inside
        the library, and is never allowed outside. ``grammar``: owner of the shared lexer; None for a private
        lexer.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._width = width
        self._spare = spare
        self._shared = grammar
        self._taken: list[int] = []
        """Tokens accepted by the library's matcher while the lexer is shared."""
        self._ends = 0
        """Number of end ids accepted at the end. The library's matcher does not see these ids."""

    def accept(self, token: int) -> bool:
        """Accept ``token`` and return True, or return False if the grammar refuses ``token``.

        A full shared lexer is replaced by a private lexer first. Raises InvalidRequest if the library's
        matcher has failed.
        """
        if self._ends == 0 and self._matcher.try_consume_tokens([token]) == 1:
            if self._shared is not None:
                self._taken.append(token)
                self._shared.tokens += 1
            return True
        # A full shared lexer also refuses valid tokens: try again with a private lexer.
        if self._ends == 0 and token not in self._vocabulary.end_ids and self._lexer_renewed():
            return self.accept(token)
        self._raise_errors()
        if token in self._vocabulary.end_ids and (self._ends > 0 or self._matcher.is_accepting()):
            self._ends += 1
            return True
        return False

    def rollback(self, tokens: int) -> None:
        """Take back the last ``tokens`` accepted tokens. Raises ValueError if the library cannot."""
        # End ids come last, so a rollback removes end ids first.
        ends = min(tokens, self._ends)
        self._ends -= ends
        if tokens > ends and not self._matcher.rollback(tokens - ends):
            raise ValueError(f"cannot take back {tokens} tokens")
        if tokens > ends and self._taken:
            del self._taken[ends - tokens :]

    def fill(self, words: np.ndarray) -> None:
        """Overwrite ``words`` with the mask of the next token, one bit per id.

        A full shared lexer is replaced by a private lexer first. Raises InvalidRequest if the library's
        matcher has failed.
        """
        if self._ends > 0:
            words[:] = 0
            self._allow_ends(words)
            return
        count = (self._width + 31) // 32
        if count == words.size and words.flags.c_contiguous:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        else:  # the spare id needs an extra word, or the row is not contiguous
            scratch = np.empty(count, np.int32)
            self._matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
            words[:] = scratch[: words.size]
        if self._matcher.is_error() and self._lexer_renewed():
            self.fill(words)
            return
        self._raise_errors()
        word, bit = divmod(self._spare, 32)
        if word < words.size:
            words.view(np.uint32)[word] &= np.uint32(0xFFFFFFFF ^ (1 << bit))
        if self._matcher.is_accepting():
            self._allow_ends(words)

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        """Fill row i of ``words`` [matchers, words] for matcher i.

        Return the indices of rows that failed; the content of these rows is undefined.
        """
        rows = cast(Sequence[LlguidanceMatcher], matchers)
        count = (self._width + 31) // 32
        direct = count == words.shape[1] and words.flags.c_contiguous
        buffer = words if direct else np.empty((len(rows), count), np.int32)
        failed: list[int] = []
        ending: list[int] = []  # rows that may end
        at, size = buffer.ctypes.data, 4 * count
        for number, row in enumerate(rows):
            # After an end id, only end ids may follow.
            if row._ends:
                buffer[number] = 0
                ending.append(number)
            else:
                matcher = row._matcher
                matcher.unsafe_compute_mask_ptr(at, size)
                if matcher.is_error():
                    failed.append(number)
                elif matcher.is_accepting():
                    ending.append(number)
            at += size
        if not direct:
            words[:] = buffer[:, : words.shape[1]]
        word, bit = divmod(self._spare, 32)
        bits = words.view(np.uint32)
        if word < words.shape[1]:
            bits[:, word] &= np.uint32(0xFFFFFFFF ^ (1 << bit))
        if ending:
            for number in self._vocabulary.end_ids:
                bits[ending, number // 32] |= np.uint32(1 << (number % 32))
        return failed

    @property
    def ended(self) -> bool:
        return self._ends > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    def _allow_ends(self, words: np.ndarray) -> None:
        bits = words.view(np.uint32)
        for number in self._vocabulary.end_ids:
            bits[number // 32] |= np.uint32(1 << (number % 32))

    def _lexer_renewed(self) -> bool:
        """Switch to a private lexer if the shared lexer may be full.

        Return False if the old matcher stays in use.

        Other outputs also add states to a shared lexer, and these states must not affect this output. A full
        lexer appears as an error of a mask, and is noted on the grammar. A token that needs a new state,
        however, is refused without an error. Therefore the first refusal without an error is tried again.
        Masks allow only valid samples, so refusals are rare.
        """
        failed = self._matcher.is_error()
        if self._shared is None or (failed and _FULL not in self._matcher.get_error()):
            return False
        # At most one attempt per matcher: afterwards the lexer counts as private.
        grammar, self._shared = self._shared, None
        grammar.full |= failed
        if grammar.renew is None:
            return False
        matcher = grammar.renew()
        # Replay the output in the new lexer.
        if matcher.try_consume_tokens(self._taken) != len(self._taken):
            return False
        self._matcher, self._taken = matcher, []
        return True

    def _raise_errors(self) -> None:
        """Raise InvalidRequest if the library's matcher has failed."""
        if self._matcher.is_error():
            if "NoExtension" in self._matcher.get_error():
                raise InvalidRequest("no output satisfies the grammar")
            raise InvalidRequest(f"the grammar is too complex to follow: {_plain(self._matcher.get_error())}")


def make_llguidance(tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> LlguidanceCompiler:
    """Make the compiler: see ``CompilerFactory``."""
    return LlguidanceCompiler(read_vocabulary(Tokenizer.load(tokenizer), vocab_size, end_ids))


def _plain(message: str) -> str:
    """Return the first line of a library message, at most ``_MESSAGE_CHARS`` characters."""
    first = message.replace("<non-verbose/>", "").strip().split("\n")[0]
    return " ".join(first.split())[:_MESSAGE_CHARS]
