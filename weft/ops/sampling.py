"""The sampling rule as tensor functions: from logits to tokens, row by row.

For the token at absolute position p of a sequence, with x the row's logits in float32 (float64 for float64
logits):

    1  masks of a grammar, allowed tokens,
       bad words, min_tokens                    -> -inf         allow_bits_, allow_only_, mask_entries_
    2  logit bias                                               add_bias_
    3  repetition, then frequency and presence penalties        penalise_
    4  temperature below 1e-5: argmax                           greedy
    5  x / temperature                                          (caller)
    6  keep the first top_k of (x descending, id ascending); of
       these the shortest prefix that reaches top_p; of these
       those with at least min_p times the largest probability  keep_within
    7  argmax of float64(x) + Gumbel noise over what is kept    sample_filtered, sample_open

All ties go to the lowest id. R is the number of rows, V the vocabulary. A row's result never depends on other
rows. A ``broken`` row gets an arbitrary number, which may not be a valid id. Functions ending in ``_`` change
x in place; no other function writes to an argument.

Exactness of the fast forms. Step 7 skips tokens that cannot win: g spans less than 26.01, and x + g <= x -
log(1 - u) bounds a score without logarithms. Step 6 looks at the likeliest tokens first and continues only
for rows in which these tokens do not settle the cut. On the CPU these choices read the data. On other devices
nothing waits for the device, and the general form is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.ops.philox import GUMBEL_SPAN, WORD, gumbel, merge_lanes, pick_words, row_lanes, token_words

Tensor = torch.Tensor

NEG_INF = float("-inf")
BLOCK = 128
DENSE = 1 << 18  # tokens per slice of noise words, to fit the CPU's cache
WIDTHS = (128, 2048, 16384)  # leading tokens for step 6 before a sort of the whole row


class Columns(NamedTuple):
    """Places of the parameters of a draw in a row of a table, int64 [slots, columns]. The first three are
    float64, stored as bit patterns."""

    temperature: int
    top_p: int
    min_p: int
    top_k: int
    seed: int
    choice: int


def to_x(logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits [R, >= V] of any float dtype as [R, V] in float32 (float64 stays). May be a view."""
    x = logits[:, :vocab_size]
    return x if x.dtype == torch.float64 else x.float()


# --- steps 1 to 3 ---


def mask_entries_(x: Tensor, rows: Tensor, ids: Tensor, active: Tensor) -> None:
    """Set x[rows, ids] to -inf where ``active``. int64, int64, bool [N]. Entries may repeat and disagree."""
    value = torch.full(rows.shape, float("inf"), dtype=x.dtype, device=x.device).masked_fill_(active, NEG_INF)
    x.view(-1).scatter_reduce_(0, rows * x.shape[1] + ids, value, "amin")


def allow_only_(x: Tensor, allowing: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set all entries except x[rows, ids] to -inf, in rows with ``allowing`` (bool [R])."""
    kept = x[rows, ids]
    x.masked_fill_(allowing.unsqueeze(1), NEG_INF)
    x[rows, ids] = kept


def allow_bits_(x: Tensor, words: Tensor) -> None:
    """Set x[row, token] to -inf where bit ``token % 32`` of ``words[row, token // 32]`` is clear.

    ``words``: int32 [R, ceil(V / 32)].
    """
    bits = torch.arange(32, dtype=torch.int32, device=x.device)
    allowed = (words.unsqueeze(2) >> bits & 1).flatten(1)[:, : x.shape[1]]
    x.masked_fill_(allowed == 0, NEG_INF)


def add_bias_(x: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add ``values`` (float64 [N], rounded to x's dtype) to x[rows, ids]. No (row, id) pair may repeat."""
    x[rows, ids] += values.to(x.dtype)


def completes(history: Tensor, position: Tensor, prefixes: Tensor, lengths: Tensor) -> Tensor:
    """Return which of W token sequences would be complete with their last id at ``position``: bool [W].

    ``history``: ids [max_len] of one sequence, arbitrary from ``position`` (int64 []) on. ``prefixes`` [W,
    L]: each sequence without its last id, right-aligned, padded with -1 in front. ``lengths`` [W]: number of
    ids in each prefix, 1 .. L.
    """
    reach = prefixes.shape[1]
    before = position - reach + torch.arange(reach, device=history.device)
    latest = history[before.clamp_(0, history.shape[0] - 1)]
    same: Tensor = ((prefixes == latest) | (prefixes < 0)).all(dim=1)
    return same & (lengths <= position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of R rows, float64 [R] each. The values 1, 0 and 0 change nothing."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def penalise_(x: Tensor, penalties: Penalties, history: Tensor, num_prompt: Tensor, position: Tensor) -> None:
    """Apply the penalties (step 3 of the sampling rule) to x [R, V], in place.

    ``num_prompt`` and ``position`` are int64 [R]. ``history`` [R, max_len] is arbitrary from ``position`` on.
    The output is history[num_prompt : position]. Ids outside the vocabulary (placeholders) are ignored.
    """
    vocab = x.shape[1]
    repetition, frequency, presence = (
        column.to(x.dtype).unsqueeze(1)
        for column in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    at = torch.arange(history.shape[1], device=history.device)
    inside = (at < position.unsqueeze(1)) & (history >= 0) & (history < vocab)
    # Column V collects positions that do not count.
    seen = torch.where(inside, history.long(), vocab)
    output = torch.where(at >= num_prompt.unsqueeze(1), seen, vocab)
    table = torch.zeros(x.shape[0], vocab + 1, dtype=torch.int32, device=x.device)
    table.scatter_add_(1, output, torch.ones((), dtype=torch.int32, device=x.device).expand_as(output))
    count = table.gather(1, seen)
    wide = torch.nn.functional.pad(x, (0, 1))
    value = wide.gather(1, seen)
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= frequency * count + presence * (count > 0)
    # A repeated id is written several times, always with the same value.
    x.copy_(wide.scatter_(1, seen, value)[:, :vocab])


# --- steps 4 and 7 ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Arguments of a row's Gumbel noise besides the token id, int64 [R] each. Seeds are bit patterns."""

    seed: Tensor
    choice: Tensor
    position: Tensor

    def at(self, rows: Tensor | slice) -> Noise:
        return Noise(seed=self.seed[rows], choice=self.choice[rows], position=self.position[rows])

    def column(self) -> Noise:
        """Return the columns as [R, 1]."""
        return Noise(seed=self.seed[:, None], choice=self.choice[:, None], position=self.position[:, None])

    def of(self, ids: Tensor) -> Tensor:
        """Return the noise g of ``ids`` (int64, broadcasting with the columns) in float64."""
        return gumbel(token_words(self.seed, self.choice, self.position, ids))

    def lanes(self, vocab_size: int) -> tuple[Tensor, ...]:
        """Return the words of all tokens in the layout of ``row_lanes``."""
        return row_lanes(self.seed, self.choice, self.position, vocab_size)


def first_max(x: Tensor) -> Tensor:
    """Return the lowest id of each row's largest value: [R, V] -> int64 [R]. NaN counts as largest.

    On the CPU the maximum of each block of columns comes first: maxima vectorise, a search for a position
    does not.
    """
    columns = x.shape[1]
    blocks = columns // BLOCK
    if blocks < 2 or x.device.type != "cpu":
        return x.argmax(dim=-1)
    whole = x[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
    tops = whole.amax(dim=-1)
    if columns % BLOCK:
        tops = torch.cat([tops, x[:, blocks * BLOCK :].amax(dim=-1, keepdim=True)], dim=-1)
    block = tops.argmax(dim=-1)
    ids = (block * BLOCK).unsqueeze(1) + torch.arange(BLOCK, device=x.device)
    # The last, shorter block repeats its last column, which cannot precede the first of equal values.
    ids.clamp_(max=columns - 1)
    return ids.gather(1, x.gather(1, ids).argmax(dim=-1, keepdim=True)).squeeze(1)


def greedy(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (argmax int64 [R], error bool [R]). ``error``: the row has NaN or +inf, or no finite value."""
    ids = first_max(x)
    return ids, ~x.gather(1, ids.unsqueeze(1)).squeeze(1).isfinite()


def broken(x: Tensor) -> Tensor:
    """Return the rows with NaN or +inf, or without a finite value: bool [R]."""
    return ~x.amax(dim=-1).isfinite()


def _winners(count: int, owner: Tensor, ids: Tensor, score: Tensor) -> Tensor:
    """Return the lowest id with the largest score of each of ``count`` rows, over (owner, id, score) [N]."""
    best = torch.full((count,), NEG_INF, dtype=score.dtype, device=score.device)
    best.scatter_reduce_(0, owner, score, "amax")
    tied = torch.where(score == best[owner], ids, WORD)
    winner = torch.full((count,), WORD, dtype=torch.int64, device=ids.device)
    return winner.scatter_reduce_(0, owner, tied, "amin")


def _count(mask: Tensor) -> Tensor:
    """Return the number of set bits in each row: bool [R, V] -> int64 [R]. float32 is exact up to 2^24."""
    return mask.float().sum(dim=-1).long()


def _below(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a number of ``dtype`` that is not above the float64 ``value``."""
    return torch.nextafter(value.to(dtype), torch.tensor(NEG_INF, dtype=dtype, device=value.device))


def sample_all(x: Tensor, noise: Noise) -> Tensor:
    """Apply step 7 to every token in the plainest form: [R, V] -> int64 [R]. Dropped tokens are -inf."""
    vocab = x.shape[1]
    return first_max(x.double() + gumbel(merge_lanes(noise.lanes(vocab), vocab)))


def _sample_dense(x: Tensor, noise: Noise) -> Tensor:
    """Return the result of ``sample_all`` on the CPU, with exact scores for few tokens only.

    exp(x + g) = exp(x) / -log(u) <= exp(x) / (1 - u). The token with the largest bound gives a score to beat.
    Only tokens with a bound that reaches this score can win; the test allows for float32 rounding (below
    1e-5).
    """
    rows, vocab = x.shape
    lanes = noise.lanes(vocab)
    top = x.amax(dim=-1, keepdim=True)
    # (1 - u) * 2^32
    gap = merge_lanes([(lane ^ WORD).float() for lane in lanes], vocab).add_(0.5)
    bound = (x - top).float().exp_().div_(gap)

    def scores(owner: Tensor, ids: Tensor) -> Tensor:
        return x[owner, ids].double() + gumbel(pick_words(lanes, owner, ids))

    least = scores(torch.arange(rows), first_max(bound))
    # Sums that round to the same score tie, so a sum just below this score may also win.
    reach = (_below(least, torch.float64) - top[:, 0].double()).exp() * (2.0**-32 * 0.999)
    owner, ids = (bound >= reach.float().unsqueeze(1)).nonzero(as_tuple=True)
    return _winners(rows, owner, ids, scores(owner, ids))


def sample_open(x: Tensor, min_p: Tensor | None, noise: Noise) -> Tensor:
    """Return the tokens of steps 6 and 7 of the sampling rule without top_k and top_p: x [R, V], min_p
    float64 [R] -> int64 [R].
    """
    top = x.amax(dim=-1, keepdim=True)
    if x.device.type != "cpu":
        if min_p is not None:
            keep = (x.double() - top.double()).exp_() >= min_p.unsqueeze(1)
            x = x.masked_fill(~keep, NEG_INF)
        return sample_all(x, noise)
    floor = top.double() - GUMBEL_SPAN
    if min_p is not None:
        # The exact test follows. This bound only drops tokens that certainly fail the exact test.
        floor = torch.maximum(floor, top.double() + min_p.clamp(min=1e-300).log().unsqueeze(1) - 1e-3)
    near = x >= _below(floor, x.dtype)
    # Rows with few candidates are scored token by token; the other rows take the dense form.
    few = _count(near) <= x.shape[1] // 8
    if min_p is not None:
        few |= min_p > 0
    tokens = torch.empty(x.shape[0], dtype=torch.int64)
    for rows in (~few).nonzero().squeeze(1).split(max(1, DENSE // x.shape[1])):
        tokens[rows] = _sample_dense(x[rows], noise.at(rows))
    owner, ids = (near & few.unsqueeze(1)).nonzero(as_tuple=True)
    values = x[owner, ids].double()
    if min_p is not None:
        keep = (values - top[owner, 0].double()).exp() >= min_p[owner]
        owner, ids, values = owner[keep], ids[keep], values[keep]
    score = values + noise.at(owner).of(ids)
    return torch.where(few, _winners(x.shape[0], owner, ids, score), tokens)


# --- step 6 ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Filters of step 6 for R rows: top_k int64, top_p and min_p float64, [R]. V, 1 and 0 keep everything."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    all_top_k: bool
    """True if the host knows that top_k is below V in every row. Then no mass of a whole row is needed."""

    def at(self, rows: Tensor | slice) -> Filters:
        """Return the filters of ``rows``."""
        return Filters(
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            all_top_k=self.all_top_k,
        )


def top_ids(x: Tensor, count: int) -> Tensor:
    """Return the first ``count`` ids in the order (x descending, id ascending): [R, V] -> int64 [R, count].

    x may contain -inf; a row with NaN gets valid but arbitrary ids. ``torch.topk`` alone breaks ties
    arbitrarily.
    """
    vocab = x.shape[1]
    if count >= vocab:
        return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    values, ids = x.topk(count + 1, dim=-1)
    cut = values[:, count - 1 : count]
    if x.device.type == "cpu":
        wrong = (values[:, count] == cut[:, 0]).nonzero().squeeze(1)
        ids = ids[:, :count]
        if len(wrong):
            ids = ids.index_copy(0, wrong, _first_above(x[wrong], cut[wrong], count))
    else:
        ids = _first_above(x, cut, count)
    ids = ids.sort(dim=-1).values
    order = x.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _first_above(x: Tensor, cut: Tensor, count: int) -> Tensor:
    """Return the ids of values above ``cut`` and the lowest ids of equal values: [R, count], unordered.

    ``cut`` [R, 1] is the ``count``-th largest value of its row.
    """
    vocab = x.shape[1]
    above, level = x > cut, x == cut
    room = count - above.sum(dim=-1, keepdim=True)
    taken = above | (level & (level.cumsum(dim=-1) <= room))
    rank = torch.arange(vocab, 0, -1, device=x.device)
    return (vocab - torch.where(taken, rank, 0).topk(count, dim=-1).values).clamp_(max=vocab - 1)


def mass_of(x: Tensor) -> Tensor:
    """Return the sum of exp(x - max) of each row in float64: [R, V] -> [R, 1]. V alone fixes the order.

    Blocks are summed first, then the block sums one after another: torch may split one long sum differently
    for R = 1.
    """
    weights = (x.double() - x.amax(dim=-1, keepdim=True)).exp_()
    blocks = x.shape[1] // BLOCK
    whole = weights[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).sum(dim=-1)
    return torch.cat([whole, weights[:, blocks * BLOCK :]], dim=-1).cumsum(dim=-1)[:, -1:]


def keep_within(
    x: Tensor, filters: Filters, width: int, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply step 6 to the first ``width`` tokens of each row.

    ``whole``: ``mass_of`` x, needed if a row has no top_k. Returns (ids int64 [R, width] in the order of step
    6, keep bool [R, width], settled bool [R]). In rows that are not settled, tokens beyond ``width`` may be
    kept as well, and ``keep`` is meaningless.
    """
    vocab = x.shape[1]
    ids = top_ids(x, width)
    top_k, top_p = filters.top_k.unsqueeze(1), filters.top_p.unsqueeze(1)
    ordered = x.gather(1, ids).double()
    top = ordered[:, :1]
    weight = (ordered - top).exp_()  # the likeliest token has weight 1
    within = torch.arange(width, device=x.device) < top_k
    limited = weight.masked_fill(~within, 0.0)
    # Mass of the tokens after top_k. Rows without a top_k need the mass of the whole row.
    mass = limited.cumsum(dim=-1)[:, -1:]
    if whole is not None:
        mass = torch.where(top_k < vocab, mass, whole)
    reached = (limited / mass).cumsum(dim=-1)
    short = reached < top_p
    # A token stays if the tokens before it have not reached top_p. The first token always stays.
    prefix = within & torch.cat([torch.ones_like(short[:, :1]), short[:, :-1]], dim=-1)
    everything = (filters.top_p >= 1).unsqueeze(1)
    keep = torch.where(everything, within, prefix) & (weight >= filters.min_p.unsqueeze(1))
    complete = (filters.top_k <= width) | (width >= vocab)
    cut = (filters.top_k >= vocab) & (filters.top_p < 1) & ~short[:, -1]
    return ids, keep, complete | cut


def only_kept(x: Tensor, filters: Filters, whole: Tensor | None = None) -> Tensor:
    """Return x with -inf for all tokens that step 6 drops: [R, V]. ``whole``: ``mass_of`` x, if known."""
    if whole is None and not filters.all_top_k:
        whole = mass_of(x)
    ids, keep, _ = keep_within(x, filters, x.shape[1], whole)
    return x.masked_fill(~torch.zeros_like(keep).scatter_(1, ids, keep), NEG_INF)


def sample_filtered(
    x: Tensor, filters: Filters, noise: Noise, widths: tuple[int, ...] = WIDTHS, whole: Tensor | None = None
) -> Tensor:
    """Return the tokens of steps 6 and 7 of the sampling rule: x [R, V] -> int64 [R].

    ``widths`` (ascending) are tried in turn for the rows that are not settled, then the whole row is sorted.
    On devices other than the CPU the caller gives a single width that settles every row, or none.
    """
    if whole is None and not filters.all_top_k:
        whole = mass_of(x)
    if not widths or widths[0] >= x.shape[1]:
        return sample_open(only_kept(x, filters, whole), None, noise)
    ids, keep, settled = keep_within(x, filters, widths[0], whole)
    ids, order = ids.sort(dim=-1)
    score = x.gather(1, ids).double() + noise.column().of(ids)
    best = score.masked_fill_(~keep.gather(1, order), NEG_INF).argmax(dim=-1, keepdim=True)
    tokens = ids.gather(1, best).squeeze(1)
    if x.device.type != "cpu" or bool(settled.all()):
        return tokens
    rest = (~settled).nonzero().squeeze(1)
    onward = sample_filtered(
        x[rest], filters.at(rest), noise.at(rest), widths[1:], None if whole is None else whole[rest]
    )
    return tokens.index_copy(0, rest, onward)


# --- logprobs ---


def all_logprobs_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``logprobs_of`` for the whole vocabulary: (ids int64 [R, 1], values [R, 1 + V], rank int64 [R]).

    The values are those of the given token and then of each token of the vocabulary, in order of ids.
    """
    ids, own, rank = logprobs_of(logits, tokens, 0)
    return ids, torch.cat([own, logits.log_softmax(dim=-1)], dim=1), rank


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of the given tokens and of the likeliest tokens: log_softmax of the untouched logits.

    logits [R, V] float32 or float64, tokens int64 [R]. Returns (ids int64 [R, 1 + top], values [R, 1 + top]
    in the dtype of logits, rank int64 [R]). The given token comes first, then the ``top`` likeliest in the
    order (logit descending, id ascending), with -1 and -inf beyond the vocabulary. ``rank`` is 1 + the number
    of tokens ahead of the given token in this order.
    """
    vocab = logits.shape[1]
    given = tokens.unsqueeze(1)
    own = logits.gather(1, given)
    lower = torch.arange(vocab, device=logits.device) < given
    ahead = (logits > own) | ((logits == own) & lower)
    ids = torch.cat([given, top_ids(logits, min(top, vocab))], dim=1) if top else given
    values = logits.log_softmax(dim=-1).gather(1, ids)
    missing = 1 + top - ids.shape[1]
    if missing:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        values = torch.nn.functional.pad(values, (0, missing), value=NEG_INF)
    return ids, values, 1 + _count(ahead)
