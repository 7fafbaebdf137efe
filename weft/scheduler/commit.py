"""Apply the result of a step to the sequences. The row of a sequence that lost its planned slot is dropped.

Most rows are quiet: a decode row with one token that does not end the sequence. The event of a quiet row has
only the token, the number of cached tokens and the position. Quiet rows commit together, as columns. Every
other row commits alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.common.errors import EngineDead, ErrorInfo, RowError
from weft.scheduler.constraints import keep_drafts
from weft.scheduler.policy.draft_policy import DraftPolicy
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.state import SchedulerState
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.plan import LogprobRows, Segment, StepPlan, StepResult
from weft.types.routes import Routes
from weft.types.sampling import ALL_LOGPROBS


@dataclass(slots=True)
class _Row:
    """A row of a plan with a live sequence, as Python values."""

    sequence: Sequence
    run: Running
    computed: int
    """``num_computed`` before the commit of the row."""
    count: int
    logits: int
    sample: int
    answer: int
    """Index of the row in the result; -1 for a row without logits."""
    error: ErrorInfo | None
    tokens: list[int]
    """Accepted drafts and one more token; [] for a row that does not sample. If ``error`` is set, the last
    token is invalid."""
    embedding: bytes = b""
    """Pooled embedding as little-endian float32 bytes; b"" unless the row completes an embedding prompt."""
    routes: np.ndarray | None = None
    """uint16 [count, layers, top_k]; None for a row without routes."""


def commit(
    state: SchedulerState, plan: StepPlan, result: StepResult, policy: DraftPolicy | None = None
) -> list[TokenEvent]:
    """Apply the result of the oldest plan in flight and return the client events in plan order.

    Complete sequences end; slots and blocks pending on the step are free. ``policy`` receives the numbers of
    verified and accepted drafts. Raises EngineDead if ``plan`` is not the oldest plan in flight, or if
    ``result`` has another step or other rows.
    """
    if not state.in_flight or state.in_flight[0] is not plan or result.step != plan.step:
        raise EngineDead("steps must commit in plan order, each step with the result of the same step")
    if (events := _commit_steady(state, plan, result)) is not None:
        return events
    _check_rows(plan, result)
    prefill, decode = plan.prefill, plan.decode
    alive = _alive(state, decode)
    tokens = _first_tokens(decode, result)
    if policy is not None:
        _count_drafts(state, decode, alive, result, policy)
    is_quiet = alive & _quiet(state, decode, tokens, result)
    if plan.constrained:
        _advance_grammars(state, decode, tokens, is_quiet)
    row_events: list[tuple[int, TokenEvent]] = []  # (number of decode rows before the event, event)
    if prefill.rows:
        for _, row in _rows(state, prefill, _alive(state, prefill), 0, result):
            event = _commit_row(state, row, result)
            row_events += [(0, event)] if event is not None else []
    quiet_rows = is_quiet.nonzero()[0]
    if len(quiet_rows) == decode.rows:  # as in most steps: no fancy indexing
        quiet_events = _commit_quiet(state, decode.slot, tokens)
    else:
        quiet_events = _commit_quiet(state, decode.slot[quiet_rows], tokens[quiet_rows])
        for number, row in _rows(state, decode, alive & ~is_quiet, prefill.rows, result):
            event = _commit_row(state, row, result)
            row_events += [(number, event)] if event is not None else []
    # Only now: the proposed drafts continue the tokens just taken by the matchers.
    if plan.constrained and state.kv.drafts:
        keep_drafts(plan, result, state.columns.gen, state.in_slot)
    _end(state, plan)
    return _merge(quiet_rows, quiet_events, row_events)


def _end(state: SchedulerState, plan: StepPlan) -> None:
    """Take ``plan`` out of flight, and count the plan."""
    prefill, decode = plan.prefill, plan.decode
    state.counts.constrained_steps += plan.constrained
    state.committed(plan.step)
    state.counts.steps += 1
    state.counts.idle_steps += not plan.rows
    state.counts.prefill_rows += prefill.rows
    state.counts.prefill_tokens += prefill.tokens if prefill.rows else 0
    state.counts.decode_rows += decode.rows
    state.counts.mixed_steps += bool(prefill.rows and decode.rows)


def _check_rows(plan: StepPlan, result: StepResult) -> None:
    """Raise EngineDead unless ``result`` has exactly the plan's rows with logits."""
    logits = plan.decode.logits
    if plan.prefill.rows:
        logits = np.concatenate([plan.prefill.logits, logits])
    if logits.nonzero()[0].tolist() != result.rows.tolist():
        raise EngineDead("a step's result has other rows than its plan")


def _alive(state: SchedulerState, segment: Segment) -> np.ndarray:
    """Return bool [rows]: True for rows with the sequence still in the slot."""
    # `gen` of the slot changes with each new sequence
    alive: np.ndarray = state.columns.gen[segment.slot] == segment.gen
    return alive


def _count_drafts(
    state: SchedulerState, decode: Segment, alive: np.ndarray, result: StepResult, policy: DraftPolicy
) -> None:
    """Count verified and accepted drafts of the rows ``alive`` by position, and notify ``policy``."""
    rows = np.flatnonzero(alive & (decode.count > 1))
    if not len(rows):
        return
    drafts = decode.count[rows] - 1
    accepted = result.accepted[len(result.rows) - decode.rows :][rows]
    for place in range(int(drafts.max())):
        state.counts.drafts[place] += int((drafts > place).sum())
        state.counts.drafts_accepted[place] += int((accepted > place).sum())
    policy.verified(decode.slot[rows], drafts, accepted)


# ---- quiet rows


def _commit_steady(state: SchedulerState, plan: StepPlan, result: StepResult) -> list[TokenEvent] | None:
    """Commit a plan that has exactly the steady rows (``SteadyRows``), all of them quiet. Return the events
    in plan order. Return None, without any change, if the plan has other rows or a row is not quiet."""
    steady = state.unchanged()
    if steady is None or state.transfers.decodes:
        return None
    if not steady.plain(plan, result):
        return None
    committed = state.columns.num_computed[steady.slots] + 1
    tokens = result.tokens.tolist()
    _advance_quiet(state, steady.slots, committed, steady.sequences, tokens)
    _end(state, plan)
    return [
        TokenEvent(sequence=sequence, token_ids=(token,), num_cached=num_cached)
        for (sequence, num_cached), token in zip(steady.named, tokens, strict=True)
    ]


def _first_tokens(decode: Segment, result: StepResult) -> np.ndarray:
    """Return the first token of each decode row, [decode rows].

    Every decode row has logits, and decode rows are the last rows of the result.
    """
    tokens: np.ndarray = result.tokens[result.offsets[len(result.rows) - decode.rows : -1]]
    return tokens


def _quiet(state: SchedulerState, decode: Segment, tokens: np.ndarray, result: StepResult) -> np.ndarray:
    """Return bool [decode rows]: True for certainly quiet rows.

    The check is conservative: ``Sequence.ending`` decides about the end of a sequence.
    """
    if not decode.rows:
        return np.zeros(0, bool)
    columns = state.columns
    first = len(result.rows) - decode.rows
    quiet: np.ndarray = columns.quiet[decode.slot] & (decode.sample == 1)
    quiet &= ~columns.may_end(decode.slot, tokens)
    for answer, _ in result.row_error:
        if answer >= first:
            quiet[answer - first] = False
    return quiet


def _advance_grammars(
    state: SchedulerState, decode: Segment, tokens: np.ndarray, is_quiet: np.ndarray
) -> None:
    """Feed the tokens of quiet rows into the grammars. If a grammar refuses the token or is complete after
    the token, clear the row in ``is_quiet`` (bool [decode rows])."""
    rows = np.flatnonzero(is_quiet & state.columns.constrained[decode.slot])
    sequences = state.in_slot[decode.slot[rows]].tolist()
    for row, sequence, token in zip(rows.tolist(), sequences, tokens[rows].tolist(), strict=True):
        if not sequence.constraint.accept_and_continue(token):
            is_quiet[row] = False


def _commit_quiet(state: SchedulerState, slots: np.ndarray, tokens: np.ndarray) -> list[TokenEvent]:
    """Advance each of ``slots`` by one position and one token. Return one event per slot, in order.

    ``tokens``: one per slot. The rows must be quiet: no token ends its sequence, and no row failed. Full
    blocks enter the prefix cache, and blocks behind an attention window are released.
    """
    if not len(slots):
        return []
    columns = state.columns
    token_list = tokens.tolist()
    committed = columns.num_computed[slots] + 1
    _advance_quiet(state, slots, committed, state.in_slot[slots].tolist(), token_list)
    ids = columns.sequence[slots].tolist()
    cached = columns.num_cached[slots].tolist()
    if state.transfers.decodes:
        positions = np.maximum(committed - columns.origin[slots], -1).tolist()
        return [
            TokenEvent(sequence=sequence, token_ids=(token,), num_cached=num_cached, position=position)
            for sequence, token, num_cached, position in zip(ids, token_list, cached, positions, strict=True)
        ]
    return [
        TokenEvent(sequence=sequence, token_ids=(token,), num_cached=num_cached)
        for sequence, token, num_cached in zip(ids, token_list, cached, strict=True)
    ]


def _advance_quiet(
    state: SchedulerState,
    slots: np.ndarray,
    committed: np.ndarray,
    sequences: list[Sequence],
    token_list: list[int],
) -> None:
    """Advance each of ``slots`` to ``committed`` positions (integers [slots]), and append one token of
    ``token_list`` to each of ``sequences``."""
    state.columns.num_computed[slots] = committed
    for row in (committed % state.kv.block_size == 0).nonzero()[0].tolist():
        state.insert(sequences[row], int(slots[row]), int(committed[row]))
    if state.caches.slides:
        state.caches.slide_each(slots, committed, state.columns.last_step[slots])
    for sequence, token in zip(sequences, token_list, strict=True):
        sequence.tokens.append(token)
    state.counts.generation_tokens += len(token_list)


def _merge(
    quiet_rows: np.ndarray, quiet_events: list[TokenEvent], row_events: list[tuple[int, TokenEvent]]
) -> list[TokenEvent]:
    """Return all events in plan order: ``quiet_events`` of the decode rows ``quiet_rows``, merged with the
    events of other rows. ``row_events``: (number of decode rows before the event, event)."""
    if not row_events:
        return quiet_events
    places = np.searchsorted(quiet_rows, [number for number, _ in row_events]).tolist()
    events: list[TokenEvent] = []
    begin = 0
    for place, (_, event) in zip(places, row_events, strict=True):
        events += quiet_events[begin:place]
        events.append(event)
        begin = place
    return events + quiet_events[begin:]


# ---- every other row


def _rows(
    state: SchedulerState, segment: Segment, which: np.ndarray, first: int, result: StepResult
) -> list[tuple[int, _Row]]:
    """Return the rows ``which`` (bool [rows]) of ``segment``, each with the row number in the segment.

    All rows must be alive. ``first``: number of plan rows before the segment.
    """
    numbers = which.nonzero()[0]
    if not len(numbers):
        return []
    slots = segment.slot[numbers]
    logits, sample = segment.logits[numbers], segment.sample[numbers]
    # Rows without logits have no entry in the result: index -1 reads an unused dummy value.
    answers = result.rows.searchsorted(numbers + first)
    answers[logits == 0] = -1
    begins = result.offsets[answers]
    # sample > 0: accepted drafts and one more token
    ends = begins + (sample > 0) * (np.append(result.accepted, 0)[answers] + 1)
    errors = dict(result.row_error)
    embeddings, routes = _embeddings(result), _routes(result)
    rows: list[tuple[int, _Row]] = []
    for at, number in enumerate(numbers.tolist()):
        sequence, run = _running(state.in_slot[slots[at]])
        answer = int(answers[at])
        row = _Row(
            sequence=sequence,
            run=run,
            computed=int(state.columns.num_computed[slots[at]]),
            count=int(segment.count[number]),
            logits=int(logits[at]),
            sample=int(sample[at]),
            answer=answer,
            error=errors.get(answer),
            tokens=result.tokens[begins[at] : ends[at]].tolist(),
        )
        if sequence.pooling and first + number in embeddings:
            row.embedding, row.error = embeddings[first + number]
        row.routes = routes.get(first + number)
        rows.append((number, row))
    return rows


def _embeddings(result: StepResult) -> dict[int, tuple[bytes, ErrorInfo | None]]:
    """Return {plan row: (embedding bytes, error)}. The error is set if a value is not finite."""
    pooled = result.embeddings
    if pooled is None:
        return {}
    broken = RowError("the model's output for this request is not finite").info()
    found: dict[int, tuple[bytes, ErrorInfo | None]] = {}
    for row, values, length in zip(pooled.rows.tolist(), pooled.values, pooled.lengths.tolist(), strict=True):
        numbers = values[:length]
        found[row] = (numbers.astype("<f4").tobytes(), None if np.isfinite(numbers).all() else broken)
    return found


def _routes(result: StepResult) -> dict[int, np.ndarray]:
    """Return {plan row: uint16 [tokens, layers, top_k]} of the rows with routes."""
    columns = result.routes
    if columns is None:
        return {}
    offsets = columns.offsets.tolist()
    return {row: columns.ids[offsets[at] : offsets[at + 1]] for at, row in enumerate(columns.rows.tolist())}


def _running(sequence: Sequence) -> tuple[Sequence, Running]:
    """Return the sequence with its running state. Raises EngineDead if the sequence does not run."""
    run = sequence.state
    if not isinstance(run, Running):
        raise EngineDead("a slot has a sequence that does not run")
    return sequence, run


def _commit_row(state: SchedulerState, row: _Row, result: StepResult) -> TokenEvent | None:
    """Commit one row: update the sequence of the row, and the caches and counters of ``state``.

    Return the event, or None if there is nothing to report. A complete or failed sequence ends. A sequence
    that sends its blocks to another group ends with "moved" at the first token. Raises EngineDead if
    ``result`` lacks requested logprobs.
    """
    sequence, tokens, error = row.sequence, row.tokens, row.error
    accepted = max(len(tokens) - 1, 0)
    drafts = max(row.sample - 1, 0)
    if error is not None:
        tokens = tokens[:-1]  # the token of a failed row is invalid
    rejected = drafts - accepted
    if rejected:
        columns, slot = state.columns, row.run.slot
        columns.num_scheduled[slot] -= rejected
        if columns.num_scheduled[slot] == row.computed + row.count - rejected:  # no later row was planned
            columns.exact[slot] = row.count - rejected
    appended, ending = _append(sequence, tokens)  # before `_advance`: the hashes of blocks need the tokens
    prompt_logprobs = routes = None
    if error is None:  # blocks of a failed row must not enter the prefix cache
        _advance(state, row, row.computed + row.count - rejected)
        prompt_logprobs = _deliver_prompt_logprobs(row, result)
        routes = _report_routes(state, row, row.count - rejected)
    state.counts.generation_tokens += len(appended)
    if ending is None and error is not None:
        ending = ("error", None)
    elif row.embedding:
        ending = ("stop", None)
    if ending is not None and ending[0] == "error":
        error = _ending_error(state, sequence, error)
    # Routes of each chunk go out at once: all routes of a long prompt do not fit into one message.
    if not appended and prompt_logprobs is None and routes is None and ending is None:
        return None
    logprobs = _sampled_logprobs(row, result, len(appended))
    # A sender hands the sequence off with the first token instead of continuing here.
    if appended and ending is None and sequence.sends:
        state.transfers.handed_off(sequence, appended[0], logprobs)
        ending = ("moved", None)
    position = -1 if sequence.transfer is None else sequence.num_output - len(appended)
    finish, stop_id = ending or (None, None)
    if finish is not None:
        state.end(sequence, finish, error)
    accepted = min(accepted, len(appended))
    miss, sequence.miss = sequence.miss, None
    return TokenEvent(
        sequence=sequence.id,
        token_ids=tuple(appended),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached=sequence.num_cached,
        accepted=accepted,
        rejected=drafts - accepted,
        finish=finish,
        stop_id=stop_id,
        error=error if finish == "error" else None,
        position=position,
        embedding=row.embedding if finish == "stop" else b"",
        cache_miss=miss,
        routes=routes,
    )


def _report_routes(state: SchedulerState, row: _Row, count: int) -> Routes | None:
    """Return the new routes of the first ``count`` positions of a row; None for a row without routes. Later
    positions belong to rejected drafts."""
    if row.routes is None:
        return None
    state.counts.routed_tokens += count
    return row.sequence.report_routes(row.computed, row.routes[:count])


def _sampled_logprobs(row: _Row, result: StepResult, count: int) -> LogprobColumns | None:
    """Return the logprobs of the first ``count`` tokens of a row; None if there are none."""
    if not count or row.sequence.params.logprobs < 0:
        return None
    both = (result.logprobs, result.all_logprobs)
    return _columns(both, row.answer, count, row.sequence.params.logprobs)


def _ending_error(state: SchedulerState, sequence: Sequence, error: ErrorInfo | None) -> ErrorInfo | None:
    """Return the error that ends a sequence: the error of the grammar if present, else ``error``. Update the
    error counters."""
    constraint = sequence.constraint
    refusal = None if constraint is None else constraint.explain(sequence.tokens, sequence.num_prompt)
    if refusal is not None:
        state.counts.grammar_errors += 1
        return refusal
    state.counts.row_errors += 1
    return error


def _advance(state: SchedulerState, row: _Row, num_computed: int) -> None:
    """Advance the committed length. At block boundaries, insert full blocks into the prefix cache and slide
    windows."""
    sequence, run = row.sequence, row.run
    block = state.kv.block_size
    state.columns.num_computed[run.slot] = num_computed
    if num_computed // block > row.computed // block:
        state.insert(sequence, run.slot, num_computed)
    if num_computed >= sequence.num_prompt and row.computed < run.known:
        state.prompt_computed(sequence)
    state.caches.slide(run.slot, num_computed, int(state.columns.last_step[run.slot]))


def _append(sequence: Sequence, tokens: list[int]) -> tuple[list[int], tuple[str, int | None] | None]:
    """Append ``tokens`` up to the end of the sequence. Return (appended tokens, ending or None).

    A token refused by the grammar ends the sequence with an error and is not returned.
    """
    for count, token in enumerate(tokens, 1):
        sequence.take(token)
        ending = sequence.ending()
        if ending is not None:
            return tokens[: count - (ending[0] == "error")], ending
    return tokens, None


def _deliver_prompt_logprobs(row: _Row, result: StepResult) -> LogprobColumns | None:
    """Return the prompt logprobs of a row, counted as delivered from now on; None if the row has none."""
    sequence = row.sequence
    count = row.logits - row.sample
    if count <= 0:
        return None
    sequence.delivered += count
    both = (result.prompt_logprobs, result.all_prompt_logprobs)
    return _columns(both, row.answer, count, sequence.params.prompt_logprobs)


def _columns(
    both: tuple[LogprobRows | None, LogprobRows | None], index: int, count: int, top: int
) -> LogprobColumns:
    """Return the first ``count`` logprob entries of row ``index``, cut to ``1 + top`` columns.

    ``both``: rows with alternatives, rows of the whole vocabulary (``top`` is ``ALL_LOGPROBS``). Raises
    EngineDead if the result lacks the logprobs.
    """
    whole_vocabulary = top == ALL_LOGPROBS
    rows = both[whole_vocabulary]
    if rows is None or (rows.ids.shape[1] <= top and not whole_vocabulary):
        raise EngineDead("the result of a step lacks logprobs that a sequence requested")
    begin = int(rows.offsets[index])
    part = slice(begin, begin + count)
    ids = rows.ids[part, : top + 1]
    values = rows.values[part, : top + 1]
    return LogprobColumns(
        width=values.shape[1],
        ids=np.ascontiguousarray(ids, "<i4").tobytes(),
        values=np.ascontiguousarray(values, "<f4").tobytes(),
        rank=np.ascontiguousarray(rows.rank[part], "<i4").tobytes(),
    )
