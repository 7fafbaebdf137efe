"""Stop strings apply to content only, not to reasoning, calls or markup. ``stop_in`` extends them to
everything.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.text_folders import write_tokenizer
from tests.text.parsing.families import FAMILIES, SPEC, joined
from tests.text.parsing.outputs import Maker
from weft.text.choice import Choice
from weft.text.parsing.events import Content, OutputEvent
from weft.text.parsing.output import ModelOutput
from weft.text.tokenizer import Tokenizer
from weft.types.messages import TokenEvent
from weft.types.sampling import SamplingParams

HERMES = FAMILIES["hermes"]
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Observation: x\\n\\ny"}}\n</tool_call>'
SEQUENCE = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("scopes")
    write_tokenizer(folder, added=list(MARKS))
    return Tokenizer.load(folder)


def play(
    tokenizer: Tokenizer,
    text: str,
    stop: list[str],
    *,
    sizes: list[int] | None = None,
    everywhere: bool = False,
    min_tokens: int = 0,
    resumed: int = 0,
) -> Choice:
    """Return the choice with output ``text``, in events of ``sizes`` tokens (accepted drafts arrive
    together).
    """
    output = ModelOutput(HERMES.declared, tokenizer.special)
    params = SamplingParams(stop=tuple(stop), min_tokens=min_tokens)
    ids = tokenizer.encode(text, parse_special=True)
    choice = Choice(
        tokenizer,
        params,
        sequence=SEQUENCE,
        emitted_ids=ids[:resumed],
        scope=None if everywhere else output.scope(SPEC),
        visible=output.visible,
    )
    ids, sizes = ids[resumed:], [*(sizes or [])]
    while ids and not choice.finished:
        size = sizes.pop(0) if sizes else 1
        choice.on_event(TokenEvent(sequence=SEQUENCE, token_ids=tuple(ids[:size])))
        ids = ids[size:]
    if not choice.finished:
        choice.on_event(TokenEvent(sequence=SEQUENCE, finish="stop"))
    return choice


def events_of(text: str) -> list[OutputEvent]:
    parser = ModelOutput(HERMES.declared, {}).parser(SPEC)
    return joined([*parser.feed(text), *parser.close()])


def content_of(choice: Choice) -> str:
    return "".join(event.text for event in events_of(choice.text) if isinstance(event, Content))


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("<think>\nQuestion: what?\n</think>\n\nIt is so.", "Question:", "It is so."),
        ("<think>\na\n\nb\n</think>\n\nOne.\n\nTwo.", "\n\n", "One."),
        ("<think>a</think>\n\nOne", "\n\n", "One"),
        ("I look.\n" + CALL, "Observation:", "I look."),
        ("I look.\n" + CALL + "\nObservation: 3", "Observation:", "I look."),
        ("<think>a</think>b", "think", "b"),
        ("I look.\n" + CALL, "tool_call", "I look."),
        ("I look.\n" + CALL, '"name"', "I look."),
        ("see <tool_call> here, STOP now", "STOP", "see <tool_call> here, "),
        ("see <tool_call> here", "tool_", "see <"),
        ("One.\n\n", "\n\n", "One."),
    ],
)
def test_a_stop_string_ends_content_alone(tokenizer: Tokenizer, text: str, stop: str, kept: str) -> None:
    choice = play(tokenizer, text, [stop])
    assert content_of(choice) == kept
    assert (choice.stop_reason == stop) == (kept != content_of(play(tokenizer, text, [])))
    whole = [event for event in events_of(text) if not isinstance(event, Content)]
    assert [event for event in events_of(choice.text) if not isinstance(event, Content)] == whole


def test_everywhere_is_everywhere(tokenizer: Tokenizer) -> None:
    text = "<think>\nQuestion: what?\n</think>\n\nIt is so."
    choice = play(tokenizer, text, ["Question:"], everywhere=True)
    assert (choice.text, choice.stop_reason) == ("<think>\n", "Question:")
    cut = play(tokenizer, CALL, ["Observation:"], everywhere=True)
    assert cut.text == CALL.partition("Observation:")[0]


def test_a_stop_string_lies_within_one_stretch_of_content(tokenizer: Tokenizer) -> None:
    text = f"a Obser {CALL}\nvation: b"
    choice = play(tokenizer, text, ["Observation:", "Obser\nvation:"])
    assert choice.stop_reason is None
    assert choice.text == text


def test_early_tokens_complete_no_stop_string(tokenizer: Tokenizer) -> None:
    text = "<think>a</think>x STOP y STOP z"
    assert play(tokenizer, text, ["STOP"]).text == "<think>a</think>x "
    assert play(tokenizer, text, ["STOP"], min_tokens=10).text == "<think>a</think>x STOP y "


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    stop=st.sampled_from(["\n\n", "It ", "so.", "<", '"', "in", "ü", "a", "x = {"]),
)
def test_pieces_drafts_and_a_change_of_engines_end_an_output_at_the_same_token(
    tokenizer: Tokenizer, seed: int, stop: str
) -> None:
    source = random.Random(seed)
    maker = Maker(HERMES, source)
    text = maker.output() if source.random() < 0.6 else maker.mutated(maker.output())
    one = play(tokenizer, text, [stop])
    result = (one.text, one.token_ids, one.finish_reason, one.stop_reason)
    for _ in range(3):
        sizes = [source.randint(1, 9) for _ in range(len(text))]
        other = play(tokenizer, text, [stop], sizes=sizes)
        assert (other.text, other.token_ids, other.finish_reason, other.stop_reason) == result
    if len(one.token_ids) > 1:
        moved = play(tokenizer, text, [stop], resumed=source.randint(1, len(one.token_ids) - 1))
        assert (moved.text, moved.token_ids, moved.finish_reason, moved.stop_reason) == result
