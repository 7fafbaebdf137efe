"""Collectives of ranks that read each other's memory: one kernel per collective, which can be captured.

    rank 0   publish x in window 0 ── signal ──┐   ┌── await all ── read windows 0, 1, .. in order
    rank 1   publish x in window 1 ── signal ──┴───┴── await all ── read windows 0, 1, .. in order

A window is memory of one rank that all ranks of the group can read and write (``weft.parallel.peers``):

    int64 [PROGRAMS]               numbers of the last collective, written and read by this rank alone
    int64 [PROGRAMS, MOST_RANKS]   signals of the ranks to this rank
    int64 [SPARE]                  generation in which a kernel of this rank gave up; padding
    2 * PROGRAMS rooms             published data; a program uses both rooms in turn

Program p of a rank meets the programs p of the other ranks, and no other programs. All ranks launch the same
collectives in the same order, so the numbers of the programs p are equal on all ranks. No memory is reset
between collectives or replays: numbers and signals only grow. A signal is ``generation << SHIFT | number``.
A generation is one forming of the group, and is larger than all earlier ones, so signals of an ended epoch
have no effect.

Why two rooms suffice: a program publishes collective n + 2 after the signals of collective n + 1. A rank
sends such a signal after its kernel of collective n has ended, and with it all reads of the room.

A rank that waits reads the int64 ``lost``, in pinned host memory. If ``lost`` is at least the generation,
the kernel gives up: it ends at once, and its output is garbage. The host sets ``lost`` to abort. The kernel
sets ``lost`` after too many polls. In both cases the host refuses the results (``Launcher.check``).

INVARIANT: no rank reads data computed from garbage. The later kernels of a rank that gave up are queued
already, or are part of a graph, and would publish such data. A peer that comes late would find their signals
and end its step, before its own host learns of the abort. So a kernel that gives up writes its generation
into the window of its rank, and later kernels of the generation send no signals and wait for none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton.forms import power

Tensor = torch.Tensor

PROGRAMS = 64
"""Maximum number of programs of a collective. All must run at the same time."""
MOST_RANKS = 8
ROOM = 1 << 16
"""Bytes of a room."""
SHIFT = 40
"""Bits of the number of a collective in a signal."""
LOOK = 64
"""Polls of a signal between two reads of ``lost``, which lies behind a slower link."""
MOST_POLLS = 1 << 30
"""Polls before a rank gives up: some minutes on a GPU. The host aborts much earlier."""
SPARE = 16
"""Words behind the signals: the first one is in use, and the rooms stay aligned."""
CONTROL = 8 * (PROGRAMS * (1 + MOST_RANKS) + SPARE)
"""Bytes in front of the rooms."""
WINDOW = CONTROL + 2 * PROGRAMS * ROOM
"""Bytes of a window."""
AT_ONCE = 1024
"""Elements of a step of a program."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _changing(ptr):
    """Return an int64 [128] that may change now. Branch on the maximum, which is the same in all threads.

    All threads of a program must branch alike, and a scalar load may give each thread another value.
    """
    return tl.load(ptr + tl.zeros([128], dtype=tl.int32), volatile=True)


@triton.jit
def _await(
    signal_ptr, wanted, lost_ptr, gave_up_ptr, generation, LOOK: tl.constexpr, MOST_POLLS: tl.constexpr
):
    """Wait until the signal is at least ``wanted``, or give up when the generation is lost."""
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    polls = tl.zeros([], dtype=tl.int64)
    while seen < wanted:
        seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % LOOK == 0:
            late = polls >= MOST_POLLS
            if late:
                tl.store(lost_ptr, generation)
            if late | (tl.max(_changing(lost_ptr), 0) >= generation):
                tl.store(gave_up_ptr, generation)
                seen = wanted


@triton.jit(do_not_specialize=["rank"])
def _meet(
    x_ptr,  # [PARTS, count]
    out_ptr,  # [count] with ADD, else [SIZE, count]
    table_ptr,  # int64 [2 + SIZE]: generation, address of ``lost``, address of each rank's window
    count,
    share,  # elements of a program, a multiple of BLOCK
    rank,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MOST_RANKS: tl.constexpr,
    CONTROL: tl.constexpr,
    ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
    LOOK: tl.constexpr,
    MOST_POLLS: tl.constexpr,
):
    """Compute one share of a collective.

    PARTS = 1: every rank reads all of x. PARTS = SIZE: rank r reads part r of x. ADD: the output is the sum
    over ranks, in order, in the type WIDE, rounded once. Else the output is what was read, in order of ranks.
    """
    word = tl.pointer_type(tl.int64)
    program = tl.program_id(0)
    wide = tl.cast(count, tl.int64)  # a cast: Triton passes a count of 1 as a constant
    begin = program.to(tl.int64) * share
    end = tl.minimum(begin + share, count)
    generation = tl.load(table_ptr)
    lost_ptr = tl.load(table_ptr + 1).to(word)
    own = tl.load(table_ptr + 2 + rank)
    number_ptr = own.to(word) + program
    number = tl.load(number_ptr) + 1
    signal = (generation << SHIFT) | number
    gave_up_ptr = own.to(word) + PROGRAMS * (1 + MOST_RANKS)
    gave_up = _changing(gave_up_ptr)  # of earlier kernels, or of another program of this kernel
    room = CONTROL + ((number % 2) * PROGRAMS + program) * ROOM

    # Publish. The room has the parts one behind another, with ``share`` elements each.
    room_ptr = (own + room).to(x_ptr.dtype)
    for part in tl.static_range(PARTS):
        from_ptr = x_ptr + wide * part
        to_ptr = tl.multiple_of(room_ptr + share * part - begin, 16)
        for at in range(begin, end, BLOCK):
            places = at + tl.arange(0, BLOCK)
            tl.store(to_ptr + places, tl.load(from_ptr + places, mask=places < end), mask=places < end)

    # The barrier orders the stores of all threads before the release of one thread.
    tl.debug_barrier()
    if tl.max(gave_up, 0) < generation:
        for peer in tl.static_range(SIZE):
            signals = tl.load(table_ptr + 2 + peer).to(word) + PROGRAMS
            tl.atomic_xchg(signals + program * MOST_RANKS + rank, signal, sem="release", scope="sys")
        signals = own.to(word) + PROGRAMS + program * MOST_RANKS
        for peer in tl.static_range(SIZE):
            _await(signals + peer, signal, lost_ptr, gave_up_ptr, generation, LOOK, MOST_POLLS)
    tl.debug_barrier()
    tl.store(number_ptr, number)

    part = rank if PARTS > 1 else 0
    for at in range(begin, end, BLOCK):
        places = at + tl.arange(0, BLOCK)
        live = places < end
        total = tl.zeros([BLOCK], dtype=WIDE)
        for peer in tl.static_range(SIZE):
            peer_ptr = (tl.load(table_ptr + 2 + peer) + room).to(x_ptr.dtype)
            peer_ptr = tl.multiple_of(peer_ptr + share * part - begin, 16)
            # Past the first cache: an earlier collective may have left an old line there.
            read = tl.load(peer_ptr + places, mask=live, cache_modifier=".cg")
            if ADD:
                # The first addend is taken as it is: 0 + -0 is 0.
                total = read.to(WIDE) if peer == 0 else total + read.to(WIDE)
            else:
                tl.store(out_ptr + wide * peer + places, read, mask=live)
        if ADD:
            tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=live)


def fits(elements: int, parts: int, itemsize: int) -> bool:
    """Return True if ``parts`` parts of ``elements`` elements fit into the rooms of a window."""
    return parts * _share(elements, itemsize) * itemsize <= ROOM


def _share(count: int, itemsize: int) -> int:
    """Return the elements of a program: a multiple of the step, as few as all programs allow."""
    step = _step(count, itemsize)
    return -(-count // (PROGRAMS * step)) * step


def _step(count: int, itemsize: int) -> int:
    """Return the elements of a step: a power of two of at least 16 bytes, for aligned rooms."""
    return max(16 // itemsize, min(AT_ONCE, power(count)))


def add(x: Tensor, table: Tensor, rank: int, size: int) -> Tensor:
    """Return the sum of every rank's x [n], as a new tensor [n]. ``table``: see ``_meet``."""
    out = torch.empty_like(x)
    _launch(x, out, table, x.numel(), rank, size, 1, True)
    return out


def scatter(x: Tensor, table: Tensor, rank: int, size: int) -> Tensor:
    """Return the sum of every rank's x[rank] [n]. x: [size, n]."""
    out = torch.empty_like(x[0])
    _launch(x, out, table, out.numel(), rank, size, size, True)
    return out


def gather(x: Tensor, table: Tensor, rank: int, size: int) -> Tensor:
    """Return the x [n] of every rank, [size, n]."""
    out = x.new_empty(size, x.numel())
    _launch(_bits(x), _bits(out), table, x.numel(), rank, size, 1, False)
    return out


def exchange(x: Tensor, table: Tensor, rank: int, size: int) -> Tensor:
    """Return the x[rank] [n] of every rank, [size, n]. x: [size, n]."""
    out = torch.empty_like(x)
    _launch(_bits(x), _bits(out), table, x.numel() // size, rank, size, size, False)
    return out


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.itemsize])


def _launch(
    x: Tensor, out: Tensor, table: Tensor, count: int, rank: int, size: int, parts: int, adds: bool
) -> None:
    """Launch the collective over contiguous tensors with ``parts * count`` elements, which must fit."""
    step, share = _step(count, x.itemsize), _share(count, x.itemsize)
    _meet[(-(-count // share),)](
        *(x, out, table, count, share, rank),
        SIZE=size,
        PARTS=parts,
        ADD=adds,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK=step,
        PROGRAMS=PROGRAMS,
        MOST_RANKS=MOST_RANKS,
        CONTROL=CONTROL,
        ROOM=ROOM,
        SHIFT=SHIFT,
        LOOK=LOOK,
        MOST_POLLS=MOST_POLLS,
        num_warps=4,
    )
