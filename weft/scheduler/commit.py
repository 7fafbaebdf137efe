"""Commit: what a step's result changes. Rows of tenancies that ended since the plan was made are dropped."""

from __future__ import annotations

import numpy as np

from weft.common.errors import EngineDead, ErrorInfo
from weft.scheduler.book import Book
from weft.scheduler.draft import Row
from weft.scheduler.sequence import Sequence
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.plan import LogprobRows, StepPlan, StepResult


class _Answers:
    """A result, row by row, as Python values."""

    def __init__(self, result: StepResult) -> None:
        self.rows: list[int] = result.rows.tolist()
        self._offsets: list[int] = result.offsets.tolist()
        self._tokens: list[int] = result.tokens.tolist()
        self._accepted: list[int] = result.accepted.tolist()
        self._errors = dict(result.row_error)
        self._logprobs = result.logprobs
        self._prompt_logprobs = result.prompt_logprobs

    def error(self, index: int) -> ErrorInfo | None:
        return self._errors.get(index)

    def tokens(self, index: int) -> list[int]:
        """The valid tokens of a sampling row."""
        begin = self._offsets[index]
        return self._tokens[begin : begin + self._accepted[index] + 1]

    def logprobs(self, index: int, count: int, top: int) -> LogprobColumns:
        """Of the row's first ``count`` sampled tokens."""
        return _columns(self._logprobs, index, count, top)

    def prompt_logprobs(self, index: int, count: int, top: int) -> LogprobColumns:
        """Of the row's ``count`` prompt positions."""
        return _columns(self._prompt_logprobs, index, count, top)


def commit(book: Book, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
    """Applies the result of the oldest plan in flight and returns what clients should hear, in plan order.

    Raises EngineDead when plan or result is another step's.
    """
    if not book.in_flight or book.in_flight[0].plan.step != plan.step or result.step != plan.step:
        raise EngineDead("steps must commit in the order they were planned, each with its own result")
    answers = _Answers(result)
    events: list[TokenEvent] = []
    index = -1
    for number, row in enumerate(book.in_flight[0].rows):
        if row.logits:
            index += 1
            if index >= len(answers.rows) or answers.rows[index] != number:
                raise EngineDead("a step's result has other rows than its plan")
        if row.sequence.state is row.run:
            event = _commit_row(book, row, answers, index)
            if event is not None:
                events.append(event)
    book.committed(plan.step)
    book.counts.steps += 1
    book.counts.mixed_steps += bool(plan.prefill.rows and plan.decode.rows)
    return events


def _commit_row(book: Book, row: Row, answers: _Answers, index: int) -> TokenEvent | None:
    sequence, run = row.sequence, row.run
    error = answers.error(index) if row.logits else None
    if error is not None:
        book.counts.row_errors += 1
        book.end(sequence, "error")
        return TokenEvent(sequence=sequence.id, num_cached=sequence.num_cached, finish="error", error=error)
    tokens = answers.tokens(index) if row.sample else []
    rejected = max(row.sample - len(tokens), 0)
    run.num_scheduled -= rejected
    _advance(book, row, run.num_computed + row.count - rejected)
    prompt_logprobs = _deliver_prompt_logprobs(row, answers, index)
    made, ending = _append(sequence, tokens)
    book.counts.generation_tokens += len(made)
    if not made and prompt_logprobs is None:
        return None
    logprobs = None
    if made and sequence.params.logprobs >= 0:
        logprobs = answers.logprobs(index, len(made), sequence.params.logprobs)
    finish, stop_id = ending or (None, None)
    if finish is not None:
        book.end(sequence, finish)
    return TokenEvent(
        sequence=sequence.id,
        token_ids=tuple(made),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached=sequence.num_cached,
        finish=finish,
        stop_id=stop_id,
    )


def _advance(book: Book, row: Row, num_computed: int) -> None:
    """Moves the committed length; at block boundaries publishes what is full and slides windows."""
    sequence, run, block = row.sequence, row.run, book.kv.block_size
    before, run.num_computed = run.num_computed, num_computed
    if num_computed // block > before // block:
        book.publish(sequence, run)
    if num_computed >= sequence.num_prompt and before < run.known:
        book.prompt_computed(sequence)
    book.caches.slide(run.slot, num_computed, run.last_step)


def _append(sequence: Sequence, tokens: list[int]) -> tuple[list[int], tuple[str, int | None] | None]:
    """Appends as many of ``tokens`` as the sequence takes: (those, how it ended)."""
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        ending = sequence.ending()
        if ending is not None:
            return tokens[:count], ending
    return tokens, None


def _deliver_prompt_logprobs(row: Row, answers: _Answers, index: int) -> LogprobColumns | None:
    sequence, count = row.sequence, row.logits - row.sample
    if count <= 0:
        return None
    sequence.delivered += count
    return answers.prompt_logprobs(index, count, sequence.params.prompt_logprobs)


def _columns(rows: LogprobRows | None, index: int, count: int, top: int) -> LogprobColumns:
    """The first ``count`` entries of row ``index``, cut to ``1 + top`` columns."""
    if rows is None or rows.ids.shape[1] <= top:
        raise EngineDead("a step's result lacks logprobs that its sequences asked for")
    begin = int(rows.offsets[index])
    part = slice(begin, begin + count)
    ids, values = rows.ids[part, : top + 1], rows.values[part, : top + 1]
    return LogprobColumns(
        width=ids.shape[1],
        ids=np.ascontiguousarray(ids, "<i4").tobytes(),
        values=np.ascontiguousarray(values, "<f4").tobytes(),
        rank=np.ascontiguousarray(rows.rank[part], "<i4").tobytes(),
    )
