"""Both backends on each form of grammar, over several types of tokenizers."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from tests.grammar.rig import BACKENDS, KINDS, Rig, folder, schema
from weft.types.grammar import (
    ContextFree,
    FreeText,
    Grammar,
    GrammarSequence,
    OneOf,
    Regex,
    Repeated,
    Text,
    Triggered,
)

OBJECT = schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
FORMS: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "text": (Text("ab é"), ["ab é"], ["", "ab", "ab é!"]),
    "free": (FreeText(), ["", "x", "über 日本\n"], []),
    "free with ends": (
        GrammarSequence((FreeText(ends=("END", "STOP")), Text("!"))),
        ["END!", "a STOP!", "EN END!"],
        ["a", "END", "a END STOP!", "a!"],
    ),
    "free without": (FreeText(without=("no", "ad")), ["yes", "n o"], ["no", "a bad one"]),
    "json": (OBJECT, ['{"a":1}', '{ "a" : 1 }', '{"a": -20}'], ["{}", ' {"a":1}', '{"a":1} ', '{"a":01}']),
    "compact": (
        schema({"type": "array", "items": {"type": "integer"}}, compact=True),
        ["[1, 2]", "[]"],
        ["[1,2]", "[ 1, 2]", "[1 , 2]"],
    ),
    "regex": (Regex("[a-c]+(?:/x)?"), ["a", "cab/x"], ["", "d", "a/"]),
    "choice": (
        OneOf((Text("yes"), Text("yesterday"), Text("no"))),
        ["yes", "yesterday", "no"],
        ["ye", "nono"],
    ),
    "sequence": (
        GrammarSequence((Regex("a*"), Text("a"), Regex("[0-9]?"), Text(";"))),
        ["a;", "aaa;", "aa7;"],
        [";", "7;", "a77;"],
    ),
    "repeated": (
        Repeated(part=OBJECT, between=", ", least=1, most=2),
        ['{"a":1}', '{"a":1}, {"a":2}'],
        ["", '{"a":1}, ', '{"a":1}, {"a":2}, {"a":3}'],
    ),
    "repeated or none": (
        Repeated(part=Text("ab"), between=","),
        ["", "ab", "ab,ab,ab"],
        [",", "ab,", "abab"],
    ),
    "rules": (ContextFree('start: "a" start "b" | "c"'), ["c", "aacbb"], ["ac", "acbb"]),
    "gbnf": (ContextFree('root ::= "a" root "b" | [c-d]+'), ["c", "adcb"], ["ab", "aacb"]),
    "triggered": (
        Triggered(trigger="<f>", parts=(GrammarSequence((OBJECT, Text("</f>"))), Text("none"))),
        ["prose <f", '<f>{"a":1}</f> and <f>none', ""],
        ["<f>", '<f>{"b":1}</f>', "<f>x"],
    ),
    "triggered once": (
        Triggered(trigger="<f>", parts=(Text("x"),), least=1, most=1),
        ["<f>x", "a<f>x b"],
        ["", "a", "<f>x<f>x"],
    ),
}


@pytest.mark.requirement("G6")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_form_takes_its_texts_and_no_others(backend: str, kind: str) -> None:
    rig = Rig(backend, kind)
    for grammar, good, bad in FORMS.values():
        rig.check(grammar, good, bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_are_what_would_be_accepted(backend: str, kind: str) -> None:
    """Checks every id, ids beyond the tokenizer included, at every position of an output."""
    rig = Rig(backend, kind, extra=40)
    form = GrammarSequence((FreeText(ends=("END",)), OBJECT))
    matcher = rig.compile(form).matcher()
    for token in [*rig.ids('so END{"a": 1}'), rig.ends[1]]:
        accepted = set()
        for candidate in range(rig.size):
            if matcher.accept(candidate):
                accepted.add(candidate)
                matcher.rollback(1)
        assert accepted == rig.mask(matcher)
        assert matcher.accept(token)


@pytest.mark.parametrize("extra", [0, 1, 63])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_is_one_row_and_leaves_the_others(backend: str, extra: int) -> None:
    rig = Rig(backend, "bundled", extra=extra)
    rows = np.full((3, (rig.size + 31) // 32), 7, np.int32)
    rig.compile(Text("hello")).matcher().fill(rows[1])
    assert (rows[0] == 7).all()
    assert (rows[2] == 7).all()
    allowed = np.flatnonzero(np.unpackbits(rows[1].view(np.uint8), bitorder="little"))
    pieces = {rig.tokenizer.token_bytes(int(token)) for token in allowed}
    assert pieces
    assert all(b"hello".startswith(piece) for piece in pieces)
    columns = np.zeros((rows.shape[1], 2), np.int32)
    rig.compile(Text("hello")).matcher().fill(columns[:, 0])
    assert (columns[:, 0] == rows[1]).all()
    assert not columns[:, 1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_of_turn_come_where_the_grammar_may_end(backend: str) -> None:
    rig = Rig(backend)
    matcher = rig.compile(Regex("ab?")).matcher()
    assert not set(rig.ends) & rig.mask(matcher)
    assert not matcher.accept(rig.ends[0])
    assert matcher.accept(rig.ids("a")[0])
    assert not matcher.ended
    assert set(rig.ends) < rig.mask(matcher)
    assert matcher.accept(rig.ids("b")[0])
    assert matcher.ended
    assert rig.mask(matcher) == set(rig.ends)
    assert matcher.accept(rig.ends[1])
    assert matcher.ended
    assert rig.mask(matcher) == set(rig.ends)
    matcher.rollback(2)
    assert not matcher.ended
    assert rig.ids("b")[0] in rig.mask(matcher)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grammar_may_name_an_end_of_turn_inside(backend: str) -> None:
    """Some families end calls with a token that also ends a turn."""
    rig = Rig(backend)
    matcher = rig.compile(Text("call<|end|>")).matcher()
    for token in rig.ids("call"):
        assert matcher.accept(token)
    assert rig.mask(matcher) == {rig.ends[0]}
    assert not matcher.ended
    assert matcher.accept(rig.ends[0])
    assert matcher.ended
    matcher.rollback(1)
    assert rig.mask(matcher) == {rig.ends[0]}


@pytest.mark.parametrize("kind", ["level", "fallback"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_markup_comes_only_where_the_grammar_names_it(backend: str, kind: str) -> None:
    rig = Rig(backend, kind)
    markup = set(rig.tokenizer.added.values()) - set(rig.ends)
    for grammar in (
        FreeText(),
        FreeText(ends=("END",)),
        Regex("[^x]*"),
        schema({}),
        schema({"type": "string"}),
    ):
        matcher = rig.compile(grammar).matcher()
        for token in rig.ids('"a'):
            if matcher.accept(token):
                assert not markup & rig.mask(matcher)
    matcher = rig.compile(Text("<tool_call>\n")).matcher()
    assert rig.mask(matcher) == {rig.tokenizer.added["<tool_call>"]}


@pytest.mark.requirement("G6")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reasoning_and_an_object_are_one_grammar(backend: str) -> None:
    """Reasoning opened by the prompt or by the model is part of the grammar, without extra state."""
    rig = Rig(backend)
    rest = (FreeText(ends=("</think>",)), Text("\n\n"), OBJECT)
    opened = GrammarSequence(rest)
    opens = GrammarSequence((Text("<think>"), *rest))
    text = 'so {"b": 2}, then</think>\n\n{"a":1}'
    rig.check(opened, [text, '</think>\n\n{"a":1}'], ['{"a":1}', 'so</think>{"a":1}', f"<think>{text}"])
    rig.check(opens, [f"<think>{text}"], [text, '<think>so</think>\n\n```{"a":1}'])
    spelled = [*(n for char in "</think" for n in rig.ids(char)), *rig.ids(">")]
    matcher = rig.compile(opened).matcher()
    assert [matcher.accept(token) for token in spelled] == [True] * (len(spelled) - 1) + [False]


@pytest.mark.requirement("G6")
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_in_prose_by_tokens(backend: str) -> None:
    rig = Rig(backend)
    call = GrammarSequence((Text('\n{"name": "f", "arguments": '), OBJECT, Text("}\n</tool_call>")))
    grammar = Triggered(trigger="<tool_call>", parts=(call,))
    made = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
    rig.check(grammar, ["prose", made, f"prose {made}\n{made}"], [made[:-3], made.replace('"a"', '"b"')])
    required = GrammarSequence(
        (FreeText(ends=("</think>",)), Repeated(part=GrammarSequence((Text("<tool_call>"), call)), least=1))
    )
    rig.check(required, [f"so</think>{made}{made}"], ["so</think>", f"so</think>prose {made}", made])


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_walked_and_taken_back(backend: str) -> None:
    """After rollbacks masks equal the masks of a matcher that never saw the drafts."""
    rig = Rig(backend)
    compiled = rig.compile(GrammarSequence((FreeText(ends=("</think>",)), OBJECT)))
    ids = [*rig.ids('so</think>{"a": 12}'), rig.ends[0]]
    rng = random.Random(1)
    matcher = compiled.matcher()
    place = 0
    while place < len(ids):
        drafts = [
            token if rng.random() < 0.7 else rng.randrange(rig.size) for token in ids[place : place + 4]
        ]
        taken = 0
        while taken < len(drafts) and matcher.accept(drafts[taken]):
            taken += 1
        right = next(
            (n for n, (a, b) in enumerate(zip(drafts, ids[place:], strict=False)) if a != b), len(drafts)
        )
        keep = min(taken, right)
        matcher.rollback(taken - keep)
        place += keep
        fresh = compiled.matcher()
        assert all(fresh.accept(token) for token in ids[:place])
        assert rig.mask(matcher) == rig.mask(fresh)
        if keep == 0:
            assert matcher.accept(ids[place])
            place += 1
    assert matcher.ended
    matcher.rollback(len(ids))
    assert rig.mask(matcher) == rig.mask(compiled.matcher())


@pytest.mark.requirement("G9")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_masks_at_once_are_those_of_each(backend: str, kind: str) -> None:
    """Covers several grammars at different positions, finished matchers, and matchers that may end."""
    rig = Rig(backend, kind)
    forms = [OBJECT, FreeText(ends=("END",)), OneOf((Text("ab"), Text("abc"))), Text("a")]
    matchers = [rig.compile(form).matcher() for form in forms for _ in range(3)]
    rng = random.Random(1)
    for turn in range(12):
        wanted = np.zeros((len(matchers), -(-rig.size // 32)), np.int32)
        for matcher, row in zip(matchers, wanted, strict=True):
            matcher.fill(row)
        words = np.full_like(wanted, 7)
        assert list(matchers[turn].fill_each(matchers, words)) == []
        assert words.tolist() == wanted.tolist()
        for matcher in matchers:
            allowed = sorted(rig.mask(matcher))
            assert matcher.accept(rng.choice(allowed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_matchers_of_one_grammar_do_not_meet(backend: str) -> None:
    rig = Rig(backend)
    compiled = rig.compile(OneOf((Text("ab"), Text("cd"))))
    one, other = compiled.matcher(), compiled.matcher()
    assert one.accept(rig.ids("a")[0])
    assert other.accept(rig.ids("c")[0])
    assert one.accept(rig.ids("b")[0])
    assert other.accept(rig.ids("d")[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_white_space_in_json_comes_to_an_end(backend: str) -> None:
    rig = Rig(backend)
    matcher = rig.compile(OBJECT).matcher()
    assert matcher.accept(rig.ids("{")[0])
    blank = rig.ids(" ")[0]
    taken = 0
    while taken < 40 and matcher.accept(blank):
        taken += 1
    assert 0 < taken < 20


def test_what_xgrammar_would_spoil_is_refused() -> None:
    rig = Rig("xgrammar")
    assert "overlaps with itself" in rig.refusal(FreeText(ends=("abcab",)))
    rig.check(schema({"enum": ["é"]}), ['"é"'], ['"e"'])
    assert "beyond ASCII" in rig.refusal(schema({"enum": ["é"]}, compact=True))
    slow = " ".join(f"r{n}" for n in range(400))
    rules = "\n".join(f'r{n}: r{(n * 7 + 1) % 400}? "a" | r{(n * 3) % 400}*' for n in range(400))
    assert "too complex" in rig.refusal(ContextFree(f"start: {slow}\n{rules}"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_output_satisfies_is_refused(backend: str) -> None:
    rig = Rig(backend)
    assert "no output" in rig.refusal(ContextFree("start: start"))
    assert rig.refusal(schema({"type": "integer", "minimum": 5, "maximum": 4}))
    assert "must have an end" in rig.refusal(GrammarSequence((FreeText(), OBJECT)))


def test_a_fresh_start_of_the_front_needs_no_torch() -> None:
    code = (
        "import sys, weft.grammar.guard.compile_jobs, weft.grammar.build, weft.grammar.registry as registry;"
        f"registry.make_compiler('auto', {str(folder('bundled'))!r}, 1024, (0, 2));"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
