"""Grammars compile in a guard process: an expensive compile ends without harm to others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.grammar.rig import folder, schema
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest
from weft.grammar.backends.llguidance_backend import LEXER_TOKENS, LlguidanceGrammar, LlguidanceMatcher
from weft.grammar.guard.compile_jobs import GrammarService
from weft.grammar.guard.guarded import MAX_BYTES, BackendArguments, GuardedCompiler
from weft.grammar.registry import make_compiler
from weft.types.grammar import Grammar, Regex

PATTERN = "^(a|b)*a(a|b){%d}c{%d}$"
ENDLESS = schema({"allOf": [{"type": "string", "pattern": PATTERN % (17 + n % 3, 3 + n)} for n in range(59)]})
LARGE = [98_993, 98_981, 98_963]
GROWING = Regex("([a-z]|[a-z][a-z])*a[a-z]{40}c{3}")
"""Pattern whose random outputs each add thousands of lexer states."""


def made(backend: BackendArguments) -> Any:
    return make_compiler(backend.name, backend.tokenizer, backend.vocab_size, backend.end_ids)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuardedCompiler]:
    backend = BackendArguments(name="auto", tokenizer=str(folder("bundled")), vocab_size=1024, end_ids=(0, 2))
    guarded = GuardedCompiler(lambda: backend, deadline(30), made)
    yield guarded
    guarded.close()


@pytest.fixture
def service(compiler: GuardedCompiler) -> Iterator[GrammarService]:
    service = GrammarService(compiler, timeout=deadline(30), per_client=True)
    yield service
    service.close()


@pytest.mark.slow
@pytest.mark.requirement("F16")
def test_a_compile_without_an_end_is_refused_and_holds_no_other_up(service: GrammarService) -> None:
    endless = service.submit(ENDLESS, client=1)
    assert service.compile(schema({"type": "object"}), client=2)
    assert not endless.done()
    with pytest.raises(InvalidRequest, match="too long to compile") as refused:
        endless.wait()
    assert refused.value.error_code == "grammar_timeout"
    begin = time.monotonic()  # a refusal is cached
    with pytest.raises(InvalidRequest):
        service.compile(ENDLESS, client=1)
    assert time.monotonic() - begin < deadline(0.5)


@pytest.mark.requirement("F16")
@mostly_slow("number", LARGE, [LARGE[0]])
def test_a_grammar_that_is_too_large_is_refused(service: GrammarService, number: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        service.compile(schema({"type": "integer", "multipleOf": number}))
    assert refused.value.error_code == "grammar_too_large"


def test_what_a_compiled_grammar_takes_is_measured(service: GrammarService) -> None:
    small = service.compile(schema({"type": "object"})).nbytes
    large = service.compile(schema({"type": "integer", "multipleOf": 9_899})).nbytes
    assert 10_000 < small < 1 << 20
    assert 1 << 20 < large < MAX_BYTES


def walk(matcher: Any, tokens: int, seed: int) -> list[int]:
    """Return a random output that the grammar allows. Raise InvalidRequest."""
    draw = np.random.default_rng(seed)
    words = np.zeros(32, np.int32)
    output: list[int] = []
    for _ in range(tokens):
        matcher.fill(words)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token = int(draw.choice(ids[~np.isin(ids, (0, 2))]))
        assert matcher.accept(token)
        output.append(token)
    return output


def spend(compiled: Any, grammar: Grammar) -> None:
    """Fill the lexer that outputs of ``compiled`` share."""
    for seed in range(40):
        walk(compiled.matcher(), 400, seed)
        if compiled.full:
            return
    raise AssertionError("the lexer is not full")


@pytest.mark.requirement("F16")
def test_a_lexer_that_others_have_filled_changes_no_output(service: GrammarService) -> None:
    compiled = service.compile(GROWING)
    assert isinstance(compiled, LlguidanceGrammar)
    alone = walk(service.compile(GROWING, client=9).matcher(), 300, 99)
    begun = compiled.matcher()
    before = walk(begun, 100, 5)
    spend(compiled, GROWING)
    assert compiled.spent
    # a running output continues, also after a rollback
    begun.rollback(50)
    for token in before[50:]:
        assert begun.accept(token)
    other = service.compile(GROWING, client=9).matcher()
    for token in before:
        assert other.accept(token)
    ours, theirs = np.zeros((2, 32), np.int32)
    assert begun.fill_each([begun], ours[None]) in ([], [0])
    begun.fill(ours)
    other.fill(theirs)
    assert (ours == theirs).all()
    assert walk(compiled.matcher(), 300, 99) == alone
    # and the next request gets a lexer with space
    assert service.compile(GROWING) is not compiled


def test_a_grammar_is_compiled_again_behind_so_many_tokens(service: GrammarService) -> None:
    source = Regex("[a-z ]*")
    compiled = service.compile(source)
    matcher = compiled.matcher()
    assert isinstance(matcher, LlguidanceMatcher)
    walk(matcher, 100, 1)
    assert service.compile(source) is compiled
    while not compiled.spent:
        walk(compiled.matcher(), 100, 2)
    assert compiled.tokens <= LEXER_TOKENS + 100  # type: ignore[attr-defined]
    assert service.compile(source) is not compiled
