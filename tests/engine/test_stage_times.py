"""Times in the queue and in prefill."""

from __future__ import annotations

from weft.common.errors import ErrorInfo
from weft.engine.stage_times import StageTimes
from weft.types.messages import READINESS_SALT, SECONDS, Submit, TokenEvent
from weft.types.sampling import TokenParams


def submit(sequence: int, **fields: object) -> Submit:
    one = Submit(sequence=sequence, request=9, seed=0, prompt_ids=b"", params=TokenParams(max_tokens=4))
    import msgspec

    return msgspec.structs.replace(one, **fields)


def test_each_sequence_is_measured_once() -> None:
    now = 0.0
    times = StageTimes(None, lambda: now)
    times.submitted(submit(1), 0.0)
    times.submitted(submit(2), 1.0)
    times.admitted([1], 3.0)
    now = 5.0
    times.record([TokenEvent(sequence=1, token_ids=(7,))])
    now = 6.0
    times.record([TokenEvent(sequence=1, token_ids=(7,))])
    times.admitted([1, 2], 7.0)  # the first was preempted meanwhile
    now = 7.5
    times.record([TokenEvent(sequence=2, token_ids=(7, 7), finish="length")])
    assert (sum(times.queue.counts), times.queue.total) == (2, 3.0 + 6.0)
    assert (sum(times.prefill.counts), times.prefill.total) == (2, 2.0 + 0.5)
    assert len(times.queue.counts) == len(SECONDS) + 1


def test_continued_sequences_and_the_probe_are_not_measured() -> None:
    times = StageTimes(None, lambda: 9.0)
    times.submitted(submit(1, emitted_ids=b"abcd"), 0.0)
    times.submitted(submit(2, salt=READINESS_SALT), 0.0)
    times.admitted([1, 2], 1.0)
    times.record([TokenEvent(sequence=one, token_ids=(7,)) for one in (1, 2)])
    assert (times.queue.counts, times.prefill.counts) == ((), ())


def test_sequences_that_end_early_are_forgotten() -> None:
    times = StageTimes(None, lambda: 9.0)
    for sequence in range(4):
        times.submitted(submit(sequence), 0.0)
    times.admitted([2, 3], 1.0)
    times.forget(0)
    times.forget(2)
    failed = ErrorInfo(code="x", message="y")
    times.record([TokenEvent(sequence=one, finish="error", error=failed) for one in (1, 3)])
    assert not times._queued
    assert not times._prefilling
