"""Sampler: the parameters of every slot, and one call per step that turns logits into tokens.

``slots`` stores the parameters from ``AllocSlot``. Host copies decide which rows need masks, penalties,
filters or logprobs. Ids and positions come only from device tensors, so ``sample`` of step N + 1 may be
launched before step N was read. No function here waits for a CUDA device.

Order: ``sample`` reads the host copies at call time. Call ``sample`` of a step before any slot is allocated
or freed for a later step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from weft.ops import draw as kernels
from weft.ops import sampling as ops
from weft.ops.cpu import sampling as direct
from weft.ops.upload import upload
from weft.runner.sampling.slot_params import (
    CHANGED,
    COLUMNS,
    DIRECT,
    FLOATS,
    GREEDY,
    INTS,
    LISTS,
    MASK,
    MIN_P,
    PENALTY,
    STAGE,
    TOP_K,
    TOP_P,
    SlotParams,
    pairs_of,
    words_of,
)
from weft.runner.sampling.token_logprobs import LogprobTensors, assembled
from weft.runner.slot_state import SlotState
from weft.types.plan import TokenMasks
from weft.types.sampling import ALL_LOGPROBS

Tensor = torch.Tensor

End: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of logits [rows, >= vocab], slots (int64 [rows], on the device) and a flag (int64 [1]). Returns
int64 [rows]: tokens, -1 for a row with an error. See ``Sampler.end``."""

NO_MASKS = TokenMasks()
_WHOLE = tuple(kind | mask for kind in DIRECT for mask in (0, MASK))
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements processed at once: rows * vocabulary, and with penalties rows * history. Bounds the memory of a
step with many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Rows of logits to sample (S entries), and rows for logprobs of known prompt tokens (P entries).

    ``*_host`` are numpy integers, the other columns int64 on the device. ``position`` is the absolute
    position of the predicted token: the token to draw (sampled entries), or a token in the history (prompt
    entries). ``logits_row`` is a row of the logits.
    """

    slot_host: np.ndarray
    slot: Tensor
    logits_row: Tensor
    position: Tensor
    prompt_slot_host: np.ndarray
    prompt_slot: Tensor
    prompt_logits_row: Tensor
    prompt_position: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """Samples of a step on the device, in the order of ``SampleRows``."""

    tokens: Tensor
    """int64 [S]; 0 where ``error``, so that later steps can compute with the token until the host reads the
    error."""
    error: Tensor
    """bool [S]."""
    logprobs: LogprobTensors | None
    """Entries of slots with logprobs enabled; None without such entries."""
    prompt_logprobs: LogprobTensors | None
    """The P entries; None without such entries."""
    all_logprobs: LogprobTensors | None = None
    """As ``logprobs``, for slots that want the whole vocabulary."""
    all_prompt_logprobs: LogprobTensors | None = None
    """As ``prompt_logprobs``, for slots that want the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """R entries of one class, on the device except ``slot_host``."""

    slot_host: np.ndarray
    slot: Tensor
    logits_row: Tensor
    position: Tensor
    floats: Tensor
    """float64 [R, at least FLOATS]"""
    ints: Tensor
    """int64 [R, INTS]"""
    words: Tensor
    """int32 [masks, .]: allowed tokens as bits, for the whole step."""
    mask: Tensor
    """int64: index of each row's mask; any number for rows without a mask."""

    def at(self, rows: slice) -> _Rows:
        """Return the entries ``rows``."""
        return _Rows(
            self.slot_host[rows],
            self.slot[rows],
            self.logits_row[rows],
            self.position[rows],
            self.floats[rows],
            self.ints[rows],
            self.words,
            self.mask[rows] if len(self.mask) else self.mask,
        )

    def float_column(self, name: str) -> Tensor:
        """Return the parameter ``name`` of each row, float64 [R]."""
        return self.floats[:, FLOATS.index(name)]

    def int_column(self, name: str) -> Tensor:
        """Return the parameter ``name`` of each row, int64 [R]."""
        return self.ints[:, INTS.index(name)]

    def noise(self) -> ops.Noise:
        """Return the keys of the Gumbel noise of each row."""
        seed, choice = self.int_column("seed"), self.int_column("choice")
        return ops.Noise(seed=seed, choice=choice, position=self.position)


class Sampler:
    """Samples one group's steps. Owned by the runner and used from its thread only."""

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, processed: bool = False
    ) -> None:
        """``num_slots``: slots with parameters. ``processed``: return logprobs of sampled tokens after steps
        1 to 6 of the sampling rule instead of before."""
        self._vocab = vocab_size
        self._processed = processed
        self._device = torch.device(device)
        self.slots = SlotParams(num_slots, vocab_size, self._device)
        """Parameters per slot. The runner allocates and frees slots here."""
        empty = torch.empty(0, dtype=torch.int64, device=self._device)
        self._no_masks = empty.int(), empty

    def sample(
        self,
        logits: Tensor,
        rows: SampleRows,
        history: Tensor,
        num_prompt: Tensor,
        masks: TokenMasks = NO_MASKS,
    ) -> SampleOutput:
        """Draw the tokens of a step by the sampling rule (``weft/ops/sampling.py``).

        logits: [L, >= vocab] of any float dtype, never written. history: int [slots, max_len]; content from
        an entry's position on is arbitrary. num_prompt: int64 [slots]. ``masks``: grammar masks for some of
        the S entries. Logprobs of sampled tokens ignore the masks, unless the sampler was made with
        ``processed``.
        """
        tokens, error = self._draw_all(logits, rows, history, num_prompt, masks)
        sampled = (logits, rows, tokens, history, num_prompt, masks)
        prompt = (logits, rows, history)
        return SampleOutput(
            tokens=tokens,
            error=error,
            logprobs=self._sampled_logprobs(*sampled, False),
            prompt_logprobs=self._prompt_logprobs(*prompt, False),
            all_logprobs=self._sampled_logprobs(*sampled, True),
            all_prompt_logprobs=self._prompt_logprobs(*prompt, True),
        )

    def end(self, state: SlotState, moves: bool, logits: Tensor) -> End | None:
        """Return a function that ends a captured decode step, by the CPU extension or by kernels; None if
        neither can process ``logits``.

        The function requires one token per row, ``direct`` slots and no masks. Besides sampling, the function
        writes ids into the history and advances lengths and, with ``moves``, recurrent states. On a GPU rows
        of the spare slot change nothing, and all rows change nothing unless the flag is ``kernels.DRAWS``. A
        CPU has no flag.
        """
        if kernels.serves(logits):
            return self._end_by_kernels(state, moves)
        if not direct.serves(logits):
            return None
        floats, ints = (torch.from_numpy(rows) for rows in (self.slots.floats, self.slots.ints))
        columns = (
            floats[:, FLOATS.index("temperature")],
            floats[:, FLOATS.index("min_p")],
            ints[:, INTS.index("seed")],
            ints[:, INTS.index("choice")],
        )
        live = state.live if moves else None

        def end(logits: Tensor, slots: Tensor, flag: Tensor) -> Tensor:
            tokens, error = direct.end_decode(
                logits, slots, self._vocab, columns, state.history, state.num_computed, live
            )
            return tokens.masked_fill_(error, -1)

        return end

    def _end_by_kernels(self, state: SlotState, moves: bool) -> End:
        live = state.live if moves else None

        def end(logits: Tensor, slots: Tensor, flag: Tensor) -> Tensor:
            advance = kernels.Advance(flag, state.spare, state.history, state.num_computed, live)
            return kernels.draw(logits, self._vocab, slots, self.slots.table, COLUMNS, advance=advance)

        return end

    def warm_up(self, dtype: torch.dtype, width: int) -> None:
        """Compile the kernels of steps that are not captured: for logits of ``dtype`` with ``width`` columns,
        and for logits that were changed. Nothing to do on a CPU."""
        for one, columns in dict.fromkeys(((dtype, width), (torch.float32, self._vocab))):
            logits = torch.zeros(1, columns, dtype=one, device=self._device)
            if kernels.serves(logits):
                first = torch.zeros(1, dtype=torch.int64, device=self._device)
                self._draw_by_kernels(logits, first, first, first)

    def _draw_all(
        self, logits: Tensor, rows: SampleRows, history: Tensor, num_prompt: Tensor, masks: TokenMasks
    ) -> tuple[Tensor, Tensor]:
        """Draw all entries: (tokens int64 [S], error bool [S]). Tokens of entries with an error are 0."""
        entries = len(rows.slot_host)
        classes = self._classes_of(rows, masks)
        if (classes == GREEDY).all() and direct.serves(logits):
            tokens, error = direct.greedy(logits, rows.logits_row, self._vocab)
            return tokens.masked_fill_(error, 0), error
        whole = _WHOLE if direct.serves(logits) else ()
        if kernels.serves(logits):
            classes &= CHANGED  # the kernels draw rows of all other classes together
            if not classes.any():
                return self._draw_by_kernels(logits, rows.logits_row, rows.slot, rows.position)
            whole = (0,)
        # Sort entries by class, draw class by class, and restore the order of entries at the end.
        order = np.argsort(classes, kind="stable")
        permuted = upload(order, self._device) if (order[1:] < order[:-1]).any() else None
        step = self._rows_of(rows, order, permuted, masks)
        tokens = torch.zeros(entries, dtype=torch.int64, device=self._device)
        error = torch.zeros(entries, dtype=torch.bool, device=self._device)
        for kind, part in self._parts(classes[order], whole):
            drawn, wrong = self._draw(logits, step.at(part), int(kind), history, num_prompt)
            tokens[part], error[part] = drawn.masked_fill(wrong, 0), wrong
        if permuted is not None:
            tokens = torch.empty_like(tokens).index_copy_(0, permuted, tokens)
            error = torch.empty_like(error).index_copy_(0, permuted, error)
        return tokens, error

    def _classes_of(self, rows: SampleRows, masks: TokenMasks) -> np.ndarray:
        """Return the class bits of each entry: int64 [S]."""
        classes: np.ndarray = self.slots.classes[rows.slot_host]
        classes[masks.entries] |= MASK
        return classes

    def _rows_of(self, rows: SampleRows, order: np.ndarray, place: Tensor | None, masks: TokenMasks) -> _Rows:
        """Gather the entries ``order``. ``place``: ``order`` on the device, None if ``order`` is the
        identity."""
        at = slice(None) if place is None else place
        slots = rows.slot[at]
        values = self.slots.table[slots]
        return _Rows(
            rows.slot_host[order],
            slots,
            rows.logits_row[at],
            rows.position[at],
            values.view(torch.float64),
            values[:, len(FLOATS) :],
            *self._upload_masks(masks, order),
        )

    def _upload_masks(self, masks: TokenMasks, order: np.ndarray) -> tuple[Tensor, Tensor]:
        """Upload masks: (words int32 [masks, .], index of the mask of each entry in ``order``). Without
        masks, return two empty tensors."""
        if not len(masks.entries):
            return self._no_masks
        words, places = words_of(masks, order)
        return upload(words, self._device), upload(places, self._device)

    # --- one class of rows ---

    def _chunk(self, length: int = 0) -> int:
        """Return the rows to process at once, for rows of the vocabulary or of ``length``, whichever is
        longer."""
        return max(1, CHUNK.get(self._device.type, CHUNK["cuda"]) // max(self._vocab, length))

    def _parts(self, classes: np.ndarray, whole: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """Yield (class, slice) for runs of equal classes, cut into chunks. ``classes`` must be sorted.

        ``whole``: classes that are not cut. Rows of these classes are drawn without a copy of the logits, so
        the memory of a step needs no bound.
        """
        kinds, starts = np.unique(classes, return_index=True)
        ends = np.append(starts, len(classes))[1:]
        for kind, start, end in zip(kinds, starts, ends, strict=True):
            size = end - start if kind in whole else self._chunk()
            for begin in range(start, end, size):
                yield int(kind), slice(begin, min(begin + size, end))

    def _take(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return rows of the logits without padded columns: [R, V]. On a CPU, consecutive rows are returned
        as a view."""
        logits = logits[:, : self._vocab]
        if rows.device.type == "cpu":
            first = int(rows[0])
            count = len(rows)
            if int(rows[-1]) == first + count - 1 and bool((rows.diff() == 1).all()):
                return logits[first : first + count]
        return logits[rows]

    def _draw(
        self, logits: Tensor, rows: _Rows, kind: int, history: Tensor, num_prompt: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw rows of one class: (tokens int64 [R], error bool [R]). Tokens of rows with an error are
        arbitrary."""
        if kernels.serves(logits):
            if not kind & CHANGED:
                return self._draw_by_kernels(logits, rows.logits_row, rows.slot, rows.position)
            x, error = self._changed(logits, rows, kind, False, history, num_prompt)
            tokens, wrong = self._draw_by_kernels(x, None, rows.slot, rows.position)
            return tokens, error | wrong
        # Prefer the CPU extension: on the logits if steps 1 to 3 change nothing, else on the changed copy x.
        if (fast := direct.serves(logits)) and kind & ~MASK in DIRECT:
            masks = (rows.words, rows.mask) if kind & MASK else None
            return self._draw_directly(logits, rows.logits_row, rows, kind, masks)
        if kind == GREEDY:
            return ops.greedy(self._take(logits, rows.logits_row))
        x, error = self._changed(logits, rows, kind, fast, history, num_prompt)
        if kind & GREEDY or (fast and not kind & (TOP_K | TOP_P)):
            tokens, wrong = self._draw_directly(x, None, rows, kind) if fast else ops.greedy(x)
            return tokens, error | wrong
        x = x / rows.float_column("temperature").to(x.dtype).unsqueeze(1)
        return self._sample(x, rows, kind), error | ops.broken(x)

    def _changed(
        self, logits: Tensor, rows: _Rows, kind: int, fast: bool, history: Tensor, num_prompt: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Apply steps 1 to 3: (x [R, V], error bool [R]). The error covers values that steps 1 to 3 may hide.
        The logits are not written."""
        x, error = self._changeable(logits, rows, kind, fast)
        if kind & LISTS:
            self._apply_lists(x, rows, history, num_prompt)
        if kind & PENALTY:
            self._apply_penalties(x, rows, history, num_prompt)
        return x, error

    def _changeable(self, logits: Tensor, rows: _Rows, kind: int, fast: bool) -> tuple[Tensor, Tensor]:
        """Return x [R, V] after masks, and error bool [R]: broken rows, before steps 1 to 3 hide the cause.

        x is a view of the logits if no step changes x.
        """
        if kind & MASK and fast:
            return direct.allow_bits(logits, rows.logits_row, self._vocab, (rows.words, rows.mask))
        x = ops.to_x(self._take(logits, rows.logits_row), self._vocab)
        if not kind & (LISTS | PENALTY | MASK):
            return x, torch.zeros(len(rows.slot_host), dtype=torch.bool, device=self._device)
        error = ops.broken(x)
        x = x.clone(memory_format=torch.contiguous_format)
        if kind & MASK:
            ops.allow_bits_(x, rows.words[rows.mask])
        return x, error

    def _draw_directly(
        self, x: Tensor, at: Tensor | None, rows: _Rows, kind: int, masks: direct.Masks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run steps 4 to 7, without top_k and top_p, in the CPU extension. ``x`` is not changed.

        Return (tokens int64 [R], error bool [R]). Tokens of rows with an error are arbitrary. ``at``: rows of
        ``x`` to draw; None for all. ``masks``: masks that were not applied to ``x`` yet.
        """
        place = torch.arange(len(x)) if at is None else at
        if kind & GREEDY:
            return direct.greedy(x, place, self._vocab, masks)
        floats = (rows.float_column("temperature"), rows.float_column("min_p"))
        columns = (*floats, rows.int_column("seed"), rows.int_column("choice"))
        return direct.sample(x, place, self._vocab, *columns, rows.position, masks)

    def _draw_by_kernels(
        self, x: Tensor, at: Tensor | None, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run steps 4 to 7 by kernels: (tokens int64 [R], 0 for an error; error bool [R]). ``at``: rows of
        ``x`` to draw; None for all."""
        drawn = kernels.draw(x, self._vocab, slots, self.slots.table, COLUMNS, at, positions)
        return drawn.clamp(min=0), drawn < 0

    def _sample(self, x: Tensor, rows: _Rows, kind: int) -> Tensor:
        """Run steps 6 and 7 on rows of one class: [R, V] -> int64 [R]."""
        noise = rows.noise()
        if not kind & (TOP_K | TOP_P):
            return ops.sample_open(x, rows.float_column("min_p") if kind & MIN_P else None, noise)
        filters = self._filters(rows, kind)
        widths = ops.WIDTHS[kind >> STAGE :]
        if self._device.type != "cpu":
            widths = widths[:1] if kind & TOP_K else ()
        return ops.sample_filtered(x, filters, noise, widths)

    def _filters(self, rows: _Rows, kind: int) -> ops.Filters:
        return ops.Filters(
            top_k=rows.int_column("top_k"),
            top_p=rows.float_column("top_p"),
            min_p=rows.float_column("min_p"),
            all_top_k=bool(kind & TOP_K),
        )

    def _apply_penalties(self, x: Tensor, rows: _Rows, history: Tensor, num_prompt: Tensor) -> None:
        """Apply repetition, frequency and presence penalties to ``x`` [R, V] in place."""
        longest = history.shape[1]
        # [R, longest]: on a CPU only up to the last position; elsewhere reading that position would wait for
        # the device
        if self._device.type == "cpu":
            longest = int(rows.position.max())
        # Chunks bound rows * vocabulary only. A history may be longer than the vocabulary.
        size = self._chunk(longest)
        for begin in range(0, len(x), size):
            part = slice(begin, begin + size)
            some = rows.at(part)
            penalties = ops.Penalties(
                repetition=some.float_column("repetition_penalty"),
                frequency=some.float_column("frequency_penalty"),
                presence=some.float_column("presence_penalty"),
            )
            ids = history[some.slot, :longest]
            ops.penalise_(x[part], penalties, ids, num_prompt[some.slot], some.position)

    def _apply_lists(self, x: Tensor, rows: _Rows, history: Tensor, num_prompt: Tensor) -> None:
        """Apply allowed ids, banned ids, stop ids, bad words and biases of the rows to ``x`` [R, V] in place.
        Stop ids are banned until a row has ``min_tokens``."""
        # Collect (row, id) pairs over all rows, then change x with one call per effect.
        lists = [self.slots.lists[slot] for slot in rows.slot_host]
        entries = [(row, of) for row, of in enumerate(lists) if of is not None]
        allowed = [(row, of.allowed) for row, of in entries if of.allowed is not None]
        if allowed:
            chosen = np.zeros(len(lists), dtype=bool)
            chosen[[row for row, _ in allowed]] = True
            ops.allow_only_(x, upload(chosen, self._device), *pairs_of(allowed, self._device))
        banned = pairs_of([(row, of.banned) for row, of in entries], self._device)
        always = torch.ones(len(banned[0]), dtype=torch.bool, device=self._device)
        stop = pairs_of([(row, of.stop) for row, of in entries], self._device)
        early = rows.position - num_prompt[rows.slot] < rows.int_column("min_tokens")
        masks = [(*banned, always), (*stop, early[stop[0]])]
        for row, of in entries:
            if of.words is not None:
                words = of.words
                # Index with the slot on the host: a tensor index would be read back from the device.
                ids = history[int(rows.slot_host[row])]
                done = ops.completes(ids, rows.position[row], words.prefixes, words.lengths)
                masks.append((torch.full_like(words.last, row), words.last, done))
        ops.mask_entries_(x, *(torch.cat(columns) for columns in zip(*masks, strict=True)))
        bias = pairs_of([(row, of.bias_ids) for row, of in entries], self._device)
        if len(bias[0]):
            values = np.concatenate([of.bias for _, of in entries])
            ops.add_bias_(x, *bias, upload(values, self._device))

    # --- logprobs ---

    def _sampled_logprobs(
        self,
        logits: Tensor,
        rows: SampleRows,
        tokens: Tensor,
        history: Tensor,
        num_prompt: Tensor,
        masks: TokenMasks,
        whole: bool,
    ) -> LogprobTensors | None:
        """Return logprobs of the sampled tokens of the entries that want logprobs; None if no entry does.

        ``whole``: of the entries that want the whole vocabulary, else of the other entries.
        """
        wanted = self.slots.ints[rows.slot_host, INTS.index("logprobs")]
        entries = np.flatnonzero((wanted >= 0) & ((wanted == ALL_LOGPROBS) == whole))
        if not len(entries):
            return None
        # Processed logprobs depend on the class of a row, so rows are sorted by class, as in ``_draw_all``.
        if self._processed:
            classes = self._classes_of(rows, masks)[entries]
            by_class = np.argsort(classes, kind="stable")
            order, top = entries[by_class], int(wanted[entries].max())
            place = upload(order, self._device)
            step = self._rows_of(rows, order, place, masks)
            parts = [
                self._processed_logprobs(
                    logits, step.at(part), kind, tokens[place[part]], top, history, num_prompt
                )
                for kind, part in self._parts(classes[by_class], ())
            ]
            return assembled(parts, entries, wanted[entries], order)
        if len(entries) == len(wanted):
            return self._logprobs(logits, rows.logits_row, tokens, entries, wanted)
        index = upload(entries, self._device)
        return self._logprobs(logits, rows.logits_row[index], tokens[index], entries, wanted[entries])

    def _processed_logprobs(
        self,
        logits: Tensor,
        rows: _Rows,
        kind: int,
        tokens: Tensor,
        top: int,
        history: Tensor,
        num_prompt: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (ids, values, rank, broken) of the distribution that ``tokens`` were drawn from.

        ``rows`` are of one class. x has passed steps 1 to 3, and unless greedy also steps 5 and 6.
        """
        x, _ = self._changed(logits, rows, kind, False, history, num_prompt)
        if not kind & GREEDY:
            x = x / rows.float_column("temperature").to(x.dtype).unsqueeze(1)
            if kind & (TOP_K | TOP_P | MIN_P):
                x = ops.only_kept(x, self._filters(rows, kind))
        logprobs = ops.all_logprobs_of(x, tokens) if top == ALL_LOGPROBS else ops.logprobs_of(x, tokens, top)
        return *logprobs, ops.broken(x)

    def _prompt_logprobs(
        self, logits: Tensor, rows: SampleRows, history: Tensor, whole: bool
    ) -> LogprobTensors | None:
        """Return logprobs of prompt tokens under the logits of the preceding positions; None without such
        rows. ``whole``: see ``_sampled_logprobs``."""
        wanted = self.slots.ints[rows.prompt_slot_host, INTS.index("prompt_logprobs")].clip(min=0)
        entries = np.flatnonzero((wanted == ALL_LOGPROBS) == whole)
        if not len(entries):
            return None
        # A placeholder id lies outside the vocabulary and has no logprob. Any valid id may replace the
        # placeholder.
        tokens = history[rows.prompt_slot, rows.prompt_position].long().clamp(0, self._vocab - 1)
        at = rows.prompt_logits_row
        if len(entries) < len(wanted):
            index = upload(entries, self._device)
            at, tokens, wanted = at[index], tokens[index], wanted[entries]
        return self._logprobs(logits, at, tokens, entries, wanted)

    def _logprobs(
        self, logits: Tensor, logits_rows: Tensor, tokens: Tensor, entries: np.ndarray, wanted: np.ndarray
    ) -> LogprobTensors:
        """Return logprobs of ``tokens`` under the unchanged logits, with ``max(wanted)`` alternatives per
        entry, in chunks. ``wanted``: int [entries], number of alternatives; entries with fewer get padding.
        If all are ``ALL_LOGPROBS``, the values are of the whole vocabulary."""
        top = int(wanted.max())
        parts = []
        for begin in range(0, len(entries), self._chunk()):
            part = slice(begin, begin + self._chunk())
            x, ids = ops.to_x(self._take(logits, logits_rows[part]), self._vocab), tokens[part]
            logprobs = ops.all_logprobs_of(x, ids) if top == ALL_LOGPROBS else ops.logprobs_of(x, ids, top)
            parts.append((*logprobs, ops.broken(x)))
        return assembled(parts, entries, wanted)
