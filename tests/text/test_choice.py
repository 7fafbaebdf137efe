"""The text side of a sequence: deltas add up, stops cut, and there is exactly one end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.common.errors import ErrorInfo
from weft.text.choice import Choice, TextDelta
from weft.text.tokenizer import Tokenizer
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.sampling import SamplingParams

SEQUENCE = 7
STOP_TEXT = st.text("the quick ,.😀猫", max_size=40)


def columns(ids: list[int], top: int = 1) -> LogprobColumns:
    rows = [[token, *[(token + place) % 300 for place in range(1, top + 1)]] for token in ids]
    return LogprobColumns(
        width=1 + top,
        ids=np.asarray(rows, "<i4").tobytes(),
        values=np.asarray([[-0.5] * (1 + top)] * len(ids), "<f4").tobytes(),
        rank=np.asarray([2] * len(ids), "<i4").tobytes(),
    )


def feed(
    choice: Choice, ids: list[int], sizes: list[int], finish: str | None = "length", **end: Any
) -> list[TextDelta]:
    """Sends ``ids`` in events of the given sizes (then one by one), the last one with ``finish``."""
    deltas, at = [], 0
    sizes = [*sizes]
    while at < len(ids) or (not ids and at == 0):
        size = max(1, sizes.pop(0)) if sizes else 1
        chunk = ids[at : at + size]
        at += max(size, 1)
        last = at >= len(ids)
        event = TokenEvent(
            sequence=SEQUENCE,
            token_ids=tuple(chunk),
            logprobs=columns(chunk) if choice.logprobs is not None and chunk else None,
            finish=finish if last else None,
            **(end if last else {}),
        )
        delta = choice.on_event(event)
        if delta is not None:
            deltas.append(delta)
    return deltas


def make(tokenizer: Tokenizer, **params: Any) -> Choice:
    return Choice(tokenizer, SamplingParams(**params), sequence=SEQUENCE)


def expected(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], least: int
) -> tuple[int, str, str | None]:
    """Return (tokens kept, text, stop) by definition: the first token whose decoding completes a stop string.

    Text that was readable once counts as present, even while an incomplete character hides it.
    """
    readable = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        new = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(readable + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if new and count >= least:
            end, _, stop = min(new)
            return count, text[: end - len(stop)], stop
        readable = max(readable, len(text))
    return len(ids), tokenizer.decode(ids), None


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_deltas_add_up_and_stops_cut_at_their_token(
    all_tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = all_tokenizers[
        data.draw(st.sampled_from(["byte_level", "unigram", "fallback_bpe", "metaspace"]))
    ]
    ids = tokenizer.encode(data.draw(STOP_TEXT), add_special_tokens=False)
    stops = data.draw(st.lists(st.text("the quick,😀猫", min_size=1, max_size=3), max_size=3))
    least = data.draw(st.integers(0, 6))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=8))
    choice = make(tokenizer, stop=stops, min_tokens=least, logprobs=1)
    deltas = feed(choice, ids, sizes)
    count, text, stop = expected(tokenizer, ids, stops, least)
    assert choice.text == text == "".join(delta.text for delta in deltas)
    assert choice.token_ids == ids[:count] == [i for delta in deltas for i in delta.token_ids]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == count == sum(len(delta.logprobs or ()) for delta in deltas)
    assert choice.stop_reason == stop
    assert choice.finish_reason == ("length" if stop is None else "stop")
    assert [delta.finish_reason for delta in deltas].count(None) == len(deltas) - 1
    if stop is not None:
        assert deltas[-1].send_finish == (count < len(ids) and not _same_event(len(ids), sizes, count))


def test_drafts_behind_a_stop_string_are_rejected(all_tokenizers: dict[str, Tokenizer]) -> None:
    """Accepted drafts count only among the tokens that the choice keeps."""
    tokenizer = all_tokenizers["byte_level"]
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd"]
    choice = make(tokenizer, stop=["b"])
    choice.on_event(TokenEvent(sequence=SEQUENCE, token_ids=tuple(ids), accepted=3, rejected=1))
    assert (choice.text, choice.token_ids) == ("a", ids[:2])
    assert (choice.accepted, choice.rejected) == (2, 2)


def test_held_back_text_of_early_tokens_completes_no_stop(all_tokenizers: dict[str, Tokenizer]) -> None:
    """A run of byte tokens is held back as a whole: text before min_tokens stays exempt when released."""
    tokenizer = all_tokenizers["fallback_bpe"]
    ids = tokenizer.encode("ccc.猫", add_special_tokens=False)
    choice = make(tokenizer, stop=["c"], min_tokens=5)
    feed(choice, ids, [])
    assert (choice.text, choice.finish_reason) == (tokenizer.decode(ids), "length")
    late = make(tokenizer, stop=["c"], min_tokens=3)
    feed(late, ids, [])
    count, text, stop = expected(tokenizer, ids, ["c"], 3)
    assert (late.text, late.token_ids, late.stop_reason) == (text, ids[:count], stop)
    assert stop == "c"


def _same_event(total: int, sizes: list[int], count: int) -> bool:
    """Return True if token number ``count`` came in the event that also ended the sequence."""
    at, rest = 0, [*sizes]
    while True:
        size = rest.pop(0) if rest else 1
        if at < count <= at + size:
            return at + size >= total
        at += size


@settings(max_examples=100, deadline=None)
@given(text=STOP_TEXT, cut=st.integers(0, 40), stop=st.text("the q😀", min_size=1, max_size=3))
def test_text_so_far_is_a_prefix_of_the_final_text(
    all_tokenizers: dict[str, Tokenizer], text: str, cut: int, stop: str
) -> None:
    for name in ("byte_level", "unigram"):
        tokenizer = all_tokenizers[name]
        ids = tokenizer.encode(text, add_special_tokens=False)[:cut]
        choice = make(tokenizer, stop=[stop])
        seen = [delta.text for delta in feed(choice, ids, [])]
        whole = tokenizer.decode(ids)
        assert choice.text == "".join(seen)
        assert whole.startswith(choice.text)


def test_a_stop_string_leaves_nothing_to_what_follows(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    choice = make(tokenizer, stop=["fox"])
    ids = tokenizer.encode("the quick brown fox jumps")
    deltas = feed(choice, ids, [len(ids)], finish=None)
    assert [d.send_finish for d in deltas] == [True]
    assert choice.text == "the quick brown "
    assert choice.on_event(TokenEvent(sequence=SEQUENCE, token_ids=(5,), finish="length")) is None
    assert choice.abort() is None
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "fox")


def test_the_stop_string_is_kept_when_asked_for(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    choice = make(tokenizer, stop=["ow"], include_stop_str_in_output=True)
    feed(choice, tokenizer.encode("the quick brown fox"), [])
    assert choice.text == "the quick brow"


def test_min_tokens_lets_early_stops_pass(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    ids = tokenizer.encode("one two one two")
    choice = make(tokenizer, stop=["one"], min_tokens=2)
    feed(choice, ids, [])
    assert choice.text == "one two "
    assert choice.token_ids == ids[: len(tokenizer.encode("one two one"))]


def test_a_stop_in_a_held_back_byte_run_cuts_at_its_token(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["unigram"]
    ids = [3 + byte for byte in "猫犬".encode()]
    choice = make(tokenizer, stop=["猫"])
    feed(choice, ids, [len(ids)])
    assert choice.token_ids == ids[:3]
    assert choice.text == ""
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(("own", "reason"), [((), None), ((2,), 2)])
def test_a_stop_token_counts_but_gives_no_text(
    all_tokenizers: dict[str, Tokenizer], own: tuple[int, ...], reason: int | None
) -> None:
    tokenizer = all_tokenizers["byte_level"]
    ids = [*tokenizer.encode("the fox"), 2]
    choice = make(tokenizer, stop_token_ids=own, skip_special_tokens=False)
    deltas = feed(choice, ids, [3], finish="stop", stop_id=2)
    assert choice.text == "the fox"
    assert choice.token_ids == ids
    assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)
    assert not deltas[-1].send_finish
    shown = make(tokenizer, stop_token_ids=own, skip_special_tokens=False, include_stop_str_in_output=True)
    feed(shown, ids, [3], finish="stop", stop_id=2)
    assert shown.text == "the fox<|im_end|>"


def test_special_tokens_give_text_only_when_asked_for(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    ids = [1, *tokenizer.encode("the"), 2, *tokenizer.encode(" fox")]
    for skip, text in ((True, "the fox"), (False, "<|im_start|>the<|im_end|> fox")):
        choice = make(tokenizer, skip_special_tokens=skip)
        feed(choice, ids, [])
        assert choice.text == text


def test_what_was_held_back_comes_out_at_the_end(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    choice = make(tokenizer, stop=["fox jumps"])
    feed(choice, tokenizer.encode("the fox"), [], finish=None)
    assert choice.text == "the "
    delta = choice.on_event(TokenEvent(sequence=SEQUENCE, finish="length"))
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ("fox", "length")
    assert choice.text == "the fox"


def test_errors_and_aborts(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    error = ErrorInfo(code="non_finite_logits", message="NaN")
    failed = make(tokenizer)
    feed(failed, tokenizer.encode("the"), [], finish="error", error=error)
    assert (failed.finish_reason, failed.error, failed.text) == ("error", error, "the")
    left = make(tokenizer)
    delta = left.abort()
    assert delta is not None
    assert (delta.finish_reason, delta.send_finish) == ("abort", True)
    orphan = make(tokenizer)
    delta = orphan.abort(error)
    assert delta is not None
    assert (delta.finish_reason, delta.send_finish, delta.error) == ("error", False, error)
    stopped = make(tokenizer)
    feed(stopped, [], [], finish="abort")
    assert stopped.finish_reason == "abort"


def test_logprobs_are_read(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    choice = make(tokenizer, logprobs=2, prompt_logprobs=1)
    prompt = LogprobColumns(
        width=3,
        ids=np.asarray([[10, 10, -1]], "<i4").tobytes(),
        values=np.asarray([[-0.25, -0.25, 0]], "<f4").tobytes(),
        rank=np.asarray([1], "<i4").tobytes(),
    )
    assert choice.on_event(TokenEvent(sequence=SEQUENCE, prompt_logprobs=prompt, num_cached=3)) is None
    delta = choice.on_event(TokenEvent(sequence=SEQUENCE, token_ids=(20,), logprobs=columns([20], 2)))
    assert delta is not None
    assert delta.logprobs is not None
    assert list(delta.logprobs[0]) == [20, 21, 22]
    assert [entry.rank for entry in delta.logprobs[0].values()] == [2, 1, 2]
    assert delta.logprobs[0][20].decoded_token == tokenizer.token_text(20)
    assert choice.prompt_logprobs is not None
    assert [list(entry) for entry in choice.prompt_logprobs] == [[10]]
    assert choice.num_cached == 3


def test_a_continued_sequence_repeats_nothing(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    ids = tokenizer.encode("the quick 猫 brown fox jumps")
    params = SamplingParams(stop="fox j")
    whole = Choice(tokenizer, params, sequence=1)
    feed(whole, ids, [])
    for cut in range(len(ids)):
        first = Choice(tokenizer, params, sequence=1)
        seen = "".join(delta.text for delta in feed(first, ids[:cut], [], finish=None)) if cut else ""
        if first.finished:
            break
        second = Choice(tokenizer, params, sequence=2, emitted_ids=ids[:cut])
        assert second.text == seen
        later = "".join(delta.text for delta in feed(second, ids[cut:], []))
        assert seen + later == second.text == whole.text
        assert second.token_ids == whole.token_ids
