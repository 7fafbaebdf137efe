"""Conversion of device tensors to a ``StepResult``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from weft.common.errors import ErrorInfo, RowError
from weft.runner.batch.staging import most_each, offsets_of
from weft.runner.event_wait import wait_until
from weft.runner.expert_routes import StepRoutes
from weft.runner.pooling import Pooled
from weft.runner.sampling.sampler import SampleOutput
from weft.runner.sampling.token_logprobs import LogprobTensors
from weft.types.plan import EMPTY, EmbeddingRows, LogprobRows, StepPlan, StepResult, column


class _Copies:
    """Copies of device tensors to the host. Nothing is copied on a CPU."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._event = torch.cuda.Event() if cuda else None

    def _start(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy into new pinned memory and return the memory; on a CPU return the tensor."""
        if not self._cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def is_complete(self) -> bool:
        """Return True if the copies are complete."""
        return self._event is None or self._event.query()

    def wait(self, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the copies. Raises EngineDead after ``deadline`` (monotonic seconds).

        ``check`` raises if results of a GPU cannot be trusted: an aborted collective ends like any other
        collective. ``check`` runs during the wait and once after the wait. On a CPU nothing is waited for or
        checked.
        """
        if self._cuda:
            wait_until(self.is_complete, deadline, "a step's result did not reach the host in time", check)
            check()


class Drawn(_Copies):
    """Tokens of a captured step that sampled: one token per row, no logprobs. Read the fields only after
    ``wait``."""

    accepted: None = None

    def __init__(self, drawn: torch.Tensor, at: np.ndarray | None = None) -> None:
        """``drawn``: int64 [entries], tokens and -1 for errors, see ``End``. One copy starts on a GPU. On a
        CPU the tensor may be written again after this call. ``at``: entry of each row of the result; None:
        one entry per row."""
        super().__init__(drawn.is_cuda)
        self._at = at
        self.drawn = self._start(drawn)
        self._values = None if self._cuda else drawn.numpy().copy()
        if self._event is not None:
            self._event.record()

    @property
    def values(self) -> np.ndarray:
        """int64 [rows]: tokens, -1 for a row with an error."""
        values: np.ndarray = self.drawn.numpy() if self._values is None else self._values
        return values if self._at is None else values[self._at]


class HostCopy(_Copies):
    """Copy of the sampled output of a step to the host. Read the fields only after ``wait``."""

    def __init__(
        self,
        output: SampleOutput,
        accepted: torch.Tensor | None = None,
        drafts: torch.Tensor | None = None,
        pooled: Pooled | None = None,
        routes: StepRoutes | None = None,
    ) -> None:
        """Start the copies. The stream orders the copies after the kernels of the step.

        accepted: int64 [decode rows]; None if no row has drafts. drafts: int64 [rows with next_k > 0, most
        drafts]; None if no row wants drafts.
        """
        super().__init__(output.tokens.is_cuda)
        self.accepted = None if accepted is None else self._start(accepted)
        self.drafts = None if drafts is None else self._start(drafts)
        self.pooled = None if pooled is None else replace(pooled, values=self._start(pooled.values))
        self.routes = None if routes is None else replace(routes, ids=self._start(routes.ids))
        self.output = output
        self.tokens, self.error = self._start(output.tokens), self._start(output.error)
        self.logprobs = self._start_all(output.logprobs)
        self.prompt_logprobs = self._start_all(output.prompt_logprobs)
        self.all_logprobs = self._start_all(output.all_logprobs)
        self.all_prompt_logprobs = self._start_all(output.all_prompt_logprobs)
        if self._event is not None:
            self._event.record()

    def _start_all(self, rows: LogprobTensors | None) -> LogprobTensors | None:
        """Start the copies of all columns. Return the columns on the host; None without ``rows``."""
        if rows is None:
            return None
        return LogprobTensors(
            entries=rows.entries,
            ids=self._start(rows.ids),
            values=self._start(rows.values),
            rank=self._start(rows.rank),
            error=self._start(rows.error),
        )


def synchronize(device: torch.device, timeout: float) -> None:
    """Wait until a GPU has completed all launched work. Raises EngineDead after ``timeout`` seconds."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    late = "the GPU did not synchronize in time: its process must be restarted"
    wait_until(lambda: event.query(), time.monotonic() + timeout, late)


def to_result(plan: StepPlan, copy: HostCopy | Drawn) -> StepResult:
    """Build the result of ``plan`` from rows with logits, in plan order. ``copy`` must be complete."""
    if isinstance(copy, Drawn):
        values = copy.values
        failed = np.flatnonzero(values < 0) if len(values) and values.min() < 0 else EMPTY
        return _plain(plan, np.maximum(values, 0) if len(failed) else values, failed, EMPTY)
    more = (copy.logprobs, copy.all_logprobs, copy.routes)
    if most_each(plan) == 1 and all(part is None for part in more):
        failed = np.flatnonzero(copy.error.numpy())
        return _plain(plan, copy.tokens.numpy(), failed, _drafts(plan, copy.drafts))
    both = (plan.prefill, plan.decode)
    logits = np.concatenate([s.logits for s in both]).astype(np.int64)
    sample = np.concatenate([s.sample for s in both]).astype(np.int64)
    # [n]: plan rows with logits, their number of sampled tokens and of prompt logprobs
    rows = np.flatnonzero(logits)
    sampled = sample[rows]
    known = (logits - sample)[rows]
    owner = np.repeat(np.arange(len(rows)), sampled)
    prompt_owner = np.repeat(np.arange(len(rows)), known)
    offsets = offsets_of(sampled)
    accepted = np.zeros(len(rows), np.int64)
    if copy.accepted is not None:  # every decode row has logits, and decode rows come last
        accepted[len(rows) - plan.decode.rows :] = copy.accepted.numpy()
    sampling = np.flatnonzero(sampled)
    # Only the sample behind the last accepted draft counts: later samples belong to rejected drafts.
    wrong = [sampling[copy.error.numpy()[offsets[sampling] + accepted[sampling]]]]
    for known_tokens in (copy.prompt_logprobs, copy.all_prompt_logprobs):
        if known_tokens is not None:
            wrong.append(prompt_owner[known_tokens.entries[known_tokens.error.numpy()]])
    return StepResult(
        step=plan.step,
        rows=column(rows),
        offsets=column(offsets),
        tokens=column(copy.tokens.numpy()),
        accepted=column(accepted),
        drafts=_drafts(plan, copy.drafts),
        row_error=_errors(np.concatenate(wrong)),
        logprobs=_rows(copy.logprobs, owner, len(rows)),
        prompt_logprobs=_rows(copy.prompt_logprobs, prompt_owner, len(rows)),
        all_logprobs=_rows(copy.all_logprobs, owner, len(rows)),
        all_prompt_logprobs=_rows(copy.all_prompt_logprobs, prompt_owner, len(rows)),
        embeddings=_embeddings(copy.pooled),
        routes=None if copy.routes is None else copy.routes.result(),
    )


def _embeddings(pooled: Pooled | None) -> EmbeddingRows | None:
    if pooled is None:
        return None
    lengths = column(pooled.lengths)
    return EmbeddingRows(rows=column(pooled.rows), values=pooled.values.numpy(), lengths=lengths)


def _plain(plan: StepPlan, tokens: np.ndarray, wrong: np.ndarray, drafts: np.ndarray) -> StepResult:
    """Build the result of a step with at most one token per row and no logprobs, the common case. ``wrong``:
    int [n], rows with an error."""
    counted, rows, none = _counts(len(tokens))
    if plan.prefill.rows:  # unfinished prompts have no token
        rows = column(np.flatnonzero(np.concatenate([plan.prefill.sample, plan.decode.sample])))
    return StepResult(
        step=plan.step,
        rows=rows,
        offsets=counted,
        tokens=column(tokens),
        accepted=none,
        drafts=drafts,
        row_error=_errors(wrong),
    )


@functools.lru_cache(maxsize=64)
def _counts(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return read-only columns: 0 to ``rows`` inclusive, 0 to ``rows - 1``, and ``rows`` zeros."""
    counted = column(np.arange(rows + 1))
    return counted, counted[:-1], column(np.zeros(rows))


def _drafts(plan: StepPlan, proposed: torch.Tensor | None) -> np.ndarray:
    """Return int32 drafts of all rows one after the other, without padding; empty without ``proposed``."""
    if proposed is None:
        return EMPTY
    next_k = np.concatenate([plan.prefill.next_k, plan.decode.next_k])
    # [rows with drafts, most]: True for real drafts, False for padding
    is_draft = np.arange(proposed.shape[1]) < next_k[next_k > 0][:, None]
    return column(proposed.numpy()[is_draft])


def _errors(rows: np.ndarray) -> tuple[tuple[int, ErrorInfo], ...]:
    if not len(rows):
        return ()
    error = RowError("the model's output for this request is not finite").info()
    return tuple((int(row), error) for row in np.unique(rows))


def _rows(tensors: LogprobTensors | None, owner: np.ndarray, rows: int) -> LogprobRows | None:
    """Build logprob rows; None without ``tensors``. ``owner``: result row of every possible entry;
    ``tensors.entries`` selects entries. ``rows``: number of result rows."""
    if tensors is None:
        return None
    counts = np.bincount(owner[tensors.entries], minlength=rows)
    return LogprobRows(
        offsets=column(offsets_of(counts)),
        ids=tensors.ids.numpy().astype(np.int32),
        values=tensors.values.numpy(),
        rank=column(tensors.rank.numpy()),
    )
