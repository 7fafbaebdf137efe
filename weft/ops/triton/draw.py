"""Steps 4 to 7 of the sampling rule (weft/ops/sampling.py) in four kernels: from logits to tokens.

    _tops     [rows, blocks]   largest x of a block of tokens and its lowest id; with top_p the block's mass
    _limit    [rows]           last token that top_k and top_p keep, in the order (x descending, id
                               ascending), and the score of the likeliest token
    _score    [rows, blocks]   best score of a block: the argmax of float64(x) + Gumbel noise over kept tokens
    _finish   [rows]           best block; in a captured step also history and lengths of the row's slot

x is logit / temperature in float32, or the logit itself for a greedy row. The kernels read the parameters of
a row from the table of its slot, so one captured graph draws rows with any parameters. A program returns at
once if its row does not need the kernel.

Decisions are exact. ``_score`` starts from the score of the likeliest token. Only tokens with an upper bound
x - log(1 - u) that reaches the best score so far are scored in float64. The bound is in float32, and the test
allows for every rounding. The token with the largest bound is scored first. After four tokens, the remaining
tokens of the block are scored at once.

``_limit`` bisects the value of the last kept token. A pass sums the weights exp(x - top) in float64 over the
blocks that reach the middle, and moves one limit to a value of the row. A sum has a fixed order, so a result
depends on its row alone. The order of a sum is not the order of the torch functions: a cut may differ if the
mass equals top_p within float64 rounding. Equal values are kept from the lowest id on.

Float64 logits stay on the torch functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.ops.draw import Advance
from weft.ops.sampling import Columns
from weft.ops.triton.forms import power

Tensor = torch.Tensor

BLOCK = 2048
"""Tokens of a program."""
WARPS = 8
PIECE = 4
"""Blocks that ``_limit`` reads at a time. One program reads a whole row, so it needs many reads under way."""
LIMIT_WARPS = 16


# --- noise ---


@triton.jit
def _words(first, position, choice, k0, k1, COUNT: tl.constexpr):
    """Return the Philox words of COUNT tokens from ``first`` on, uint32. ``first`` is a multiple of 4."""
    c0 = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    c3 = c0 ^ c0
    c1 = c3 + position
    c2 = c3 + choice
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    # [COUNT / 4, 2, 2] by (counter, a, b): word 2 a + b
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [COUNT])


@triton.jit
def _gumbel(words):
    """Return the noise of each word in float64."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def _counter(
    positions_ptr, ints_ptr, row, slot, SEED: tl.constexpr, CHOICE: tl.constexpr, CAPTURED: tl.constexpr
):
    """Return (position of the drawn token, choice, low and high word of the seed) of a row, all uint32.
    ``ints_ptr``: the slot's row of the table."""
    if CAPTURED:
        position = tl.load(positions_ptr + slot) + 1
    else:
        position = tl.load(positions_ptr + row)
    seed = tl.load(ints_ptr + SEED)
    choice = tl.load(ints_ptr + CHOICE)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return position.to(tl.uint32), choice.to(tl.uint32), low, high


# --- rows ---


@triton.jit
def _slot_of(slots_ptr, flag_ptr, row, spare, CAPTURED: tl.constexpr):
    """Return (slot of the row, True if the row is drawn)."""
    slot = tl.load(slots_ptr + row)
    live = slot >= 0
    if CAPTURED:
        live = (slot != spare) & (tl.load(flag_ptr) == -1)  # ``DRAWS``
    return slot, live


@triton.jit
def _x(logits_ptr, ids, temperature, greedy, V: tl.constexpr):
    """Return x of ``ids`` in float32; -inf beyond the vocabulary. ``logits_ptr``: the row's first logit."""
    x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return tl.where(greedy, x, tl.div_rn(x, tl.where(greedy, 1.0, temperature)))


@triton.jit(
    do_not_specialize=["spare"],
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "flag_ptr"],
)
def _tops(
    logits_ptr,  # [L, >= V]
    rows_ptr,  # int64 [rows]: row of the logits; not read if CAPTURED
    slots_ptr,  # int64 [rows]
    flag_ptr,  # int64 [1], if CAPTURED
    floats_ptr,  # float64 [slots, WIDTH]
    tops_ptr,  # float32 [rows, BLOCKS]: largest x; +inf for a block with NaN
    top_ids_ptr,  # int32 [rows, BLOCKS]
    masses_ptr,  # float64 [rows, BLOCKS]: sum of exp(x - top of the block), with top_p
    stride,
    spare,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CAPTURED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot, live = _slot_of(slots_ptr, flag_ptr, row, spare, CAPTURED)
    if live:
        source = row
        if not CAPTURED:
            source = tl.load(rows_ptr + row)
        wide = tl.load(floats_ptr + slot * WIDTH + TEMPERATURE)
        greedy = wide < 1e-5
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = _x(logits_ptr + source * stride, ids, wide.to(tl.float32), greedy, V)
        nan = x != x
        x = tl.where(nan, float("-inf"), x)
        top = tl.max(x, 0)
        at = row * BLOCKS + block
        tl.store(top_ids_ptr + at, tl.min(tl.where(x == top, ids, 2147483647), 0))
        if (tl.load(floats_ptr + slot * WIDTH + TOP_P) < 1) & (top > float("-inf")):
            mass = tl.sum(tl.exp(x.to(tl.float64) - top.to(tl.float64)), 0)
            tl.store(masses_ptr + at, mass)
        tl.store(tops_ptr + at, tl.where(tl.max(nan.to(tl.int32), 0) > 0, float("inf"), top))


# --- step 6 ---


@triton.jit
def _highest(tops_ptr, block, BLOCKS: tl.constexpr, PIECE: tl.constexpr):
    """Return the largest x of PIECE blocks from ``block`` on."""
    blocks = block + tl.arange(0, PIECE)
    return tl.max(tl.load(tops_ptr + blocks, mask=blocks < BLOCKS, other=float("-inf")), 0)


@triton.jit
def _reach(
    logits_ptr,
    tops_ptr,
    value,
    top,
    temperature,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Return (number and mass of the tokens with x >= value, smallest x among them, largest x below value).

    The pointers name the first logit and the first block of a row. Without MASS, the mass is 0.
    """
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float64)
    least = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for block in range(0, BLOCKS, PIECE):
        highest = _highest(tops_ptr, block, BLOCKS, PIECE)
        if highest >= value:
            for each in tl.static_range(PIECE):
                x = _x(logits_ptr, (block + each) * BLOCK + lanes, temperature, False, V)
                inside = x >= value
                count += inside.to(tl.int32)
                if MASS:
                    mass += tl.where(inside, tl.exp(x.to(tl.float64) - top.to(tl.float64)), 0.0)
                least = tl.minimum(least, tl.where(inside, x, float("inf")))
                below = tl.maximum(below, tl.where(inside, float("-inf"), x))
        else:
            below = tl.maximum(below, highest)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _last(
    logits_ptr,
    tops_ptr,
    low,
    top,
    temperature,
    least_count,
    least_mass,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Return (largest value v of the row such that the tokens with x >= v suffice, number of tokens above v,
    their mass).

    Tokens suffice from ``least_mass`` on with MASS, else from ``least_count`` on. ``low`` is a value of the
    row for which they suffice.
    """
    high = top
    while low < high:
        # INVARIANT: low < middle <= high, so each pass moves a limit. Halves are added, as a sum may
        # overflow.
        middle = tl.minimum(low * 0.5 + high * 0.5, high)
        middle = tl.where(middle > low, middle, high)
        count, mass, least, below = _reach(
            logits_ptr, tops_ptr, middle, top, temperature, V, BLOCK, BLOCKS, PIECE, MASS
        )
        if MASS:
            enough = mass >= least_mass
        else:
            enough = count >= least_count
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, below)
    lanes = tl.arange(0, BLOCK)
    above = tl.zeros([BLOCK], dtype=tl.int32)
    over = tl.zeros([BLOCK], dtype=tl.float64)
    for block in range(0, BLOCKS, PIECE):
        if _highest(tops_ptr, block, BLOCKS, PIECE) > low:
            for each in tl.static_range(PIECE):
                x = _x(logits_ptr, (block + each) * BLOCK + lanes, temperature, False, V)
                above += (x > low).to(tl.int32)
                over += tl.where(x > low, tl.exp(x.to(tl.float64) - top.to(tl.float64)), 0.0)
    return low, tl.sum(above, 0), tl.sum(over, 0)


@triton.jit
def _nth_of_value(
    logits_ptr,
    tops_ptr,
    value,
    number,
    temperature,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the id of the ``number``-th token with x == value; the largest int32 if there are fewer."""
    lanes = tl.arange(0, BLOCK)
    seen = tl.full([], 0, tl.int32)
    found = tl.full([BLOCK], 2147483647, dtype=tl.int32)
    for block in range(BLOCKS):
        if (tl.load(tops_ptr + block) >= value) & (seen < number):
            ids = block * BLOCK + lanes
            equal = (_x(logits_ptr, ids, temperature, False, V) == value).to(tl.int32)
            rank = seen + tl.cumsum(equal, 0)
            found = tl.minimum(found, tl.where((equal > 0) & (rank == number), ids, 2147483647))
            seen += tl.sum(equal, 0)
    return tl.min(found, 0)


@triton.jit(
    do_not_specialize=["spare"],
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "flag_ptr", "positions_ptr"],
)
def _limit(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    flag_ptr,
    positions_ptr,  # int64: positions of the drawn tokens [rows]; if CAPTURED num_computed [slots]
    floats_ptr,
    ints_ptr,  # int64 [slots, WIDTH]: the memory of floats_ptr
    tops_ptr,
    top_ids_ptr,
    masses_ptr,
    reaches_ptr,  # float64 [rows]: score of the likeliest token, for a row with noise
    cuts_ptr,  # float32 [rows]: smallest kept value; -inf keeps everything that can win
    cut_ids_ptr,  # int32 [rows]: largest kept id of that value
    stride,
    spare,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_P: tl.constexpr,
    TOP_K: tl.constexpr,
    SEED: tl.constexpr,
    CHOICE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_P2: tl.constexpr,
    PIECE: tl.constexpr,
    CAPTURED: tl.constexpr,
):
    """Find the cut of one row. A kept token has x > cut, or x == cut and an id up to the cut's id."""
    row = tl.program_id(0).to(tl.int64)
    slot, live = _slot_of(slots_ptr, flag_ptr, row, spare, CAPTURED)
    if live:
        wide = tl.load(floats_ptr + slot * WIDTH + TEMPERATURE)
        top_p = tl.load(floats_ptr + slot * WIDTH + TOP_P)
        top_k = tl.load(ints_ptr + slot * WIDTH + TOP_K)
        blocks = tl.arange(0, BLOCKS_P2)
        tops_ptr += row * BLOCKS
        tops = tl.load(tops_ptr + blocks, mask=blocks < BLOCKS, other=float("-inf"))
        top = tl.max(tops, 0)
        cut = tl.full([], float("-inf"), tl.float32)
        number = tl.full([], 0, tl.int64)
        noisy = (top > float("-inf")) & (top < float("inf")) & (wide >= 1e-5)
        if noisy:
            ids = tl.load(top_ids_ptr + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=2147483647)
            first = tl.min(tl.where(tops == top, ids, 2147483647), 0)
            where, choice, k0, k1 = _counter(
                positions_ptr, ints_ptr + slot * WIDTH, row, slot, SEED, CHOICE, CAPTURED
            )
            words = _words(first // 16 * 16, where, choice, k0, k1, 16)
            own = tl.sum(tl.where(tl.arange(0, 16) == first % 16, words.to(tl.int64), 0), 0)
            tl.store(reaches_ptr + row, top.to(tl.float64) + _gumbel(own))
        if noisy & ((top_k < V) | (top_p < 1)):
            source = row
            if not CAPTURED:
                source = tl.load(rows_ptr + row)
            logits_ptr += source * stride
            temperature = wide.to(tl.float32)
            # Mass of the tokens that top_p cuts.
            there = (blocks < BLOCKS) & (tops > float("-inf"))
            masses = tl.load(masses_ptr + row * BLOCKS + blocks, mask=there, other=0.0)
            share = tl.where(there, tl.exp(tops.to(tl.float64) - top.to(tl.float64)), 0.0)
            whole = tl.sum(tl.where(top_p < 1, masses, 0.0) * share, 0)
            # Tokens below this value cannot win. A cut below it matters only for the mass.
            floor = tl.where(top_p < 1, -3.4028234663852886e38, top - 27.0)
            if top_k < V:
                count, _, least, _ = _reach(
                    logits_ptr, tops_ptr, floor, top, temperature, V, BLOCK, BLOCKS, PIECE, False
                )
                if count >= top_k:
                    cut, above, over = _last(
                        logits_ptr,
                        tops_ptr,
                        least,
                        top,
                        temperature,
                        top_k,
                        0.0,
                        V,
                        BLOCK,
                        BLOCKS,
                        PIECE,
                        False,
                    )
                    number = top_k - above
                    share_of_one = tl.exp(cut.to(tl.float64) - top.to(tl.float64))
                    whole = over + number.to(tl.float64) * share_of_one
            if top_p < 1:
                needed = top_p * whole
                low = cut
                if cut == float("-inf"):
                    _, mass, least, _ = _reach(
                        logits_ptr, tops_ptr, top - 27.0, top, temperature, V, BLOCK, BLOCKS, PIECE, True
                    )
                    low = tl.where(mass >= needed, least, low)
                if low > float("-inf"):
                    value, _, over = _last(
                        logits_ptr, tops_ptr, low, top, temperature, 0, needed, V, BLOCK, BLOCKS, PIECE, True
                    )
                    weight = tl.exp(value.to(tl.float64) - top.to(tl.float64))
                    some = ((needed - over) / weight).to(tl.int64)
                    some += (over + some.to(tl.float64) * weight < needed).to(tl.int64)
                    some = tl.maximum(some, 1)
                    # At the value of the top_k cut, the smaller number of equal tokens stays.
                    number = tl.where((value == cut) & (number < some), number, some)
                    cut = value
            if cut > float("-inf"):
                last = _nth_of_value(logits_ptr, tops_ptr, cut, number, temperature, V, BLOCK, BLOCKS)
                tl.store(cut_ids_ptr + row, last)
        tl.store(cuts_ptr + row, cut)


# --- step 7 ---


@triton.jit(
    do_not_specialize=["spare"],
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "flag_ptr", "positions_ptr"],
)
def _score(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    flag_ptr,
    positions_ptr,
    floats_ptr,
    ints_ptr,
    tops_ptr,
    reaches_ptr,
    cuts_ptr,
    cut_ids_ptr,
    scores_ptr,  # float64 [rows, BLOCKS]: best score; -inf if no token of the block can win
    winners_ptr,  # int32 [rows, BLOCKS]
    stride,
    spare,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    MIN_P: tl.constexpr,
    SEED: tl.constexpr,
    CHOICE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_P2: tl.constexpr,
    CAPTURED: tl.constexpr,
):
    """Find the best token of one block of a row with noise."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot, live = _slot_of(slots_ptr, flag_ptr, row, spare, CAPTURED)
    wide = tl.full([], 0.0, tl.float64)
    blocks = tl.arange(0, BLOCKS_P2)
    inside = blocks < BLOCKS
    tops = tl.full([BLOCKS_P2], float("-inf"), tl.float32)
    if live:
        wide = tl.load(floats_ptr + slot * WIDTH + TEMPERATURE)
        tops = tl.load(tops_ptr + row * BLOCKS + blocks, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    if (wide >= 1e-5) & (top > float("-inf")) & (top < float("inf")):
        temperature = wide.to(tl.float32)
        min_p = tl.load(floats_ptr + slot * WIDTH + MIN_P)
        cut = tl.load(cuts_ptr + row)
        peak = top.to(tl.float64)
        # Every cut keeps the likeliest token, so only a score that reaches its score can win.
        reach = tl.load(reaches_ptr + row)
        best = tl.full([], float("-inf"), tl.float64)
        winner = tl.full([], 2147483647, tl.int32)

        # Tokens below ``floor`` certainly fail min_p. The exact test follows for each scored token.
        least = tl.log(tl.where(min_p > 0, min_p, 1.0))
        floor = peak + least - 1e-3 - 1e-6 * tl.abs(peak + least)
        floor = tl.where(min_p > 0, floor, float("-inf"))
        highest = tl.load(tops_ptr + row * BLOCKS + block)
        wide_highest = highest.to(tl.float64)
        # 22.9 is above the largest noise.
        if (wide_highest + 22.9 >= reach) & (highest >= cut) & (wide_highest >= floor):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            source = row
            if not CAPTURED:
                source = tl.load(rows_ptr + row)
            x = _x(logits_ptr + source * stride, ids, temperature, False, V)
            last = tl.load(cut_ids_ptr + row, mask=cut > float("-inf"), other=0)
            kept = (x > cut) | ((x == cut) & (ids <= last))
            kept = kept & (x >= floor.to(tl.float32))
            where, choice, k0, k1 = _counter(
                positions_ptr, ints_ptr + slot * WIDTH, row, slot, SEED, CHOICE, CAPTURED
            )
            words = _words(block * BLOCK, where, choice, k0, k1, BLOCK)
            gap = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
            bound = tl.where(kept, x - tl.log(gap), float("-inf"))
            # Roundings of the bound, of the limit, and of the fast logarithm stay below a tenth of this.
            slack = 1e-4 + 1e-6 * (tl.abs(peak) + 64.0)
            largest = tl.max(bound, 0)
            tries = 0
            while (tries < 4) & (largest >= (reach - slack).to(tl.float32)):
                token = tl.min(tl.where(bound == largest, ids, 2147483647), 0)
                value = tl.sum(tl.where(ids == token, x, 0.0), 0).to(tl.float64)
                word = tl.sum(tl.where(ids == token, words.to(tl.int64), 0), 0)
                score = value + _gumbel(word)
                better = (score > best) | ((score == best) & (token < winner))
                better = better & (tl.exp(value - peak) >= min_p)
                best = tl.where(better, score, best)
                winner = tl.where(better, token, winner)
                reach = tl.where(best > reach, best, reach)
                bound = tl.where(ids == token, float("-inf"), bound)
                largest = tl.max(bound, 0)
                tries += 1
            limit = (reach - slack).to(tl.float32)
            if largest >= limit:
                values = x.to(tl.float64)
                may = (bound >= limit) & (tl.exp(values - peak) >= min_p)
                scores = tl.where(may, values + _gumbel(words), float("-inf"))
                score = tl.max(scores, 0)
                token = tl.min(tl.where(scores == score, ids, 2147483647), 0)
                better = (score > best) | ((score == best) & (token < winner))
                best = tl.where(better, score, best)
                winner = tl.where(better, token, winner)
        tl.store(scores_ptr + row * BLOCKS + block, best)
        tl.store(winners_ptr + row * BLOCKS + block, winner)


@triton.jit(
    do_not_specialize=["spare", "length"],
    do_not_specialize_on_alignment=["slots_ptr", "flag_ptr", "history_ptr", "computed_ptr", "live_ptr"],
)
def _finish(
    slots_ptr,
    flag_ptr,
    floats_ptr,
    tops_ptr,
    top_ids_ptr,
    scores_ptr,
    winners_ptr,
    out_ptr,  # int64 [rows]: token; -1 for a row that is not finite
    history_ptr,  # int32 [slots, length], if CAPTURED
    computed_ptr,  # int64 [slots], if CAPTURED
    live_ptr,  # int64 [slots], if MOVES
    length,
    spare,
    WIDTH: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_P2: tl.constexpr,
    CAPTURED: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Choose the token of one row. If CAPTURED, write the token into the history and advance the slot."""
    row = tl.program_id(0).to(tl.int64)
    slot, live = _slot_of(slots_ptr, flag_ptr, row, spare, CAPTURED)
    if live:
        blocks = tl.arange(0, BLOCKS_P2)
        inside = blocks < BLOCKS
        at = row * BLOCKS + blocks
        tops = tl.load(tops_ptr + at, mask=inside, other=float("-inf"))
        top = tl.max(tops, 0)
        finite = (top > float("-inf")) & (top < float("inf"))
        greedy = tl.load(floats_ptr + slot * WIDTH + TEMPERATURE) < 1e-5
        # Scores of greedy rows were not written: what is read for such a row is not used.
        scores = tl.load(scores_ptr + at, mask=inside, other=float("-inf"))
        winners = tl.load(winners_ptr + at, mask=inside, other=2147483647)
        sampled = tl.min(tl.where(scores == tl.max(scores, 0), winners, 2147483647), 0)
        ids = tl.load(top_ids_ptr + at, mask=inside, other=2147483647)
        first = tl.min(tl.where(tops == top, ids, 2147483647), 0)
        token = tl.where(finite, tl.where(greedy, first, sampled), 0)
        tl.store(out_ptr + row, tl.where(finite, token, -1).to(tl.int64))
        if CAPTURED:
            position = tl.load(computed_ptr + slot) + 1
            tl.store(history_ptr + slot * length + position, token)
            tl.store(computed_ptr + slot, position)
            if MOVES:
                tl.store(live_ptr + slot, tl.zeros([], dtype=tl.int64))


class _Scratch(NamedTuple):
    """Intermediate results between the kernels of one draw: [rows, blocks] or [rows]."""

    tops: Tensor
    top_ids: Tensor
    masses: Tensor
    reaches: Tensor
    cuts: Tensor
    cut_ids: Tensor
    scores: Tensor
    winners: Tensor


def _scratch(rows: int, blocks: int, device: torch.device) -> _Scratch:
    def made(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return _Scratch(
        tops=made(torch.float32, rows, blocks),
        top_ids=made(torch.int32, rows, blocks),
        masses=made(torch.float64, rows, blocks),
        reaches=made(torch.float64, rows),
        cuts=made(torch.float32, rows),
        cut_ids=made(torch.int32, rows),
        scores=made(torch.float64, rows, blocks),
        winners=made(torch.int32, rows, blocks),
    )


def draw(
    logits: Tensor,
    vocab_size: int,
    slots: Tensor,
    table: Tensor,
    columns: Columns,
    rows: Tensor | None,
    positions: Tensor | None,
    advance: Advance | None,
) -> Tensor:
    """Compute ``weft.ops.draw.draw``; ``rows`` and ``positions`` are None with ``advance`` only."""
    count = len(slots)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return out
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    assert table.is_contiguous(), "rows of the table are contiguous"
    flag, spare, history, positions, live = advance or (slots, 0, out, positions, None)
    own = _scratch(count, blocks := -(-vocab_size // BLOCK), logits.device)
    where = (logits, slots if rows is None else rows, slots, flag)
    floats, tail = table.view(torch.float64), (logits.stride(0), spare)
    of_row = {
        "WIDTH": table.shape[1],
        "TEMPERATURE": columns.temperature,
        "BLOCKS": blocks,
        "CAPTURED": advance is not None,
    }
    of_block = {**of_row, "V": vocab_size, "BLOCK": BLOCK}
    noise = {"SEED": columns.seed, "CHOICE": columns.choice, "BLOCKS_P2": power(blocks)}
    _tops[(count, blocks)](
        *(*where, floats, own.tops, own.top_ids, own.masses, *tail),
        TOP_P=columns.top_p,
        num_warps=WARPS,
        **of_block,
    )
    parameters, cuts = (positions, floats, table), (own.reaches, own.cuts, own.cut_ids)
    _limit[(count,)](
        *(*where, *parameters, own.tops, own.top_ids, own.masses, *cuts, *tail),
        TOP_P=columns.top_p,
        TOP_K=columns.top_k,
        PIECE=PIECE,
        num_warps=LIMIT_WARPS,
        **noise,
        **of_block,
    )
    _score[(count, blocks)](
        *(*where, *parameters, own.tops, *cuts, own.scores, own.winners, *tail),
        MIN_P=columns.min_p,
        num_warps=WARPS,
        **noise,
        **of_block,
    )
    _finish[(count,)](
        *(slots, flag, floats, own.tops, own.top_ids, own.scores, own.winners, out),
        *(history, positions, slots if live is None else live, history.stride(0), spare),
        BLOCKS_P2=power(blocks),
        MOVES=live is not None,
        num_warps=1,
        **of_row,
    )
    return out
