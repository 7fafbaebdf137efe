"""A sequence and its states. The state object owns the sequence's slot and block tables.

                            ╭──> Fetching ──╮
BlockedOnFirstSample ──> Blocked ───────> Waiting ──> Running
   │  │                     │             ^ │ ^─preempted─╯ │
   │  ╰─────────────────────┼─────────────╯ │               │
   ╰────────────────────────┴───────────────┴──> Ended <────╯

Running owns a slot and block tables. Fetching owns block tables without a slot. Waiting after Fetching keeps
the tables until a slot adopts the tables. All other states own nothing. Every state except Ended may end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from weft.common.errors import EngineDead
from weft.common.restarts import MOST_LOSSES
from weft.kv.hashing import HashChain
from weft.kv.snapshots import SnapshotMarks
from weft.scheduler.constraints import Constraint
from weft.types.messages import CacheMiss, Submit
from weft.types.plan import EMPTY, AllocSlot, column
from weft.types.routes import Routes
from weft.types.sampling import TokenParams

PROTECT_AFTER = 2
"""Preemptions for lack of blocks after which a sequence is admitted only with guaranteed blocks. From then on
only a batch's sequence is preempted, for a sequence of no batch."""
TURN = 32
"""Output tokens since the admission after which a waiting sequence may take the slot of a sequence."""
MOST_YIELDS = 4
"""Maximum number of preemptions of a sequence in favor of a waiting sequence."""


@dataclass(frozen=True, slots=True)
class BlockedOnFirstSample:
    """Waits until the first sample has computed the shared prompt."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Blocked: external input (KV, grammar, images) is missing. Counts neither as work nor as lack of
    progress."""


@dataclass(frozen=True, slots=True)
class FetchedTables:
    """Block tables without a slot, for KV from another group, during or after the transfer."""

    number: int
    """Negative number, in place of a slot in calls to the caches."""
    reach: int
    """Minimum number of positions covered by the tables."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Receiving KV: owns the destination blocks but no slot. Counts as no work."""

    tables: FetchedTables


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue, for the first time or again."""

    tables: FetchedTables | None = None
    """Tables with the received KV; the sequence is admitted as a decode row. None without received KV."""


@dataclass(slots=True, eq=False)
class Running:
    """The stay of a sequence in one slot, from admission to preemption or end. Compared by identity.

    0 ... num_computed ... num_scheduled ... known        prefill rows, then
    0 ... known ... num_computed ... num_scheduled        decode rows

    The counters are entries of ``SlotColumns`` at ``slot``. The next sequence in the slot overwrites the
    counters: never read the counters after the sequence has left the slot.
    """

    slot: int
    gen: int
    known: int
    """Number of ids written by AllocSlot; later ids reach the device before the scheduler. One less after a
    KV transfer: the last id is the first output token, which is computed by a decode row."""
    marks: SnapshotMarks | None = None
    """Where snapshots of the recurrent state are wanted; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Ended; the terminal event was emitted exactly once."""

    finish: str


State = BlockedOnFirstSample | Blocked | Fetching | Waiting | Running | Ended

TRANSITIONS: dict[type, tuple[type, ...]] = {
    BlockedOnFirstSample: (Blocked, Waiting, Ended),
    Blocked: (Fetching, Waiting, Ended),
    Fetching: (Waiting, Ended),
    Waiting: (Running, Blocked, Ended),
    Running: (Waiting, Ended),
    Ended: (),
}


class Sequence:
    """A token stream. ``tokens`` is the prompt plus the output known from commits or from the client."""

    __slots__ = (
        "adapter",
        "adapts_experts",
        "blocked",
        "blocked_images",
        "chain",
        "choice",
        "client",
        "constraint",
        "delivered",
        "explains",
        "forced",
        "id",
        "key",
        "limit",
        "loading",
        "loads_left",
        "logit_cost",
        "losses",
        "media",
        "media_ends",
        "miss",
        "num_cached",
        "num_prompt",
        "owner",
        "params",
        "payer",
        "place",
        "pooling",
        "preemptions",
        "prompt_logprobs",
        "relies",
        "request",
        "routed",
        "salt",
        "seed",
        "session",
        "share",
        "side_bytes",
        "spans",
        "state",
        "stop_ids",
        "tokens",
        "transfer",
        "weights",
        "yielded",
    )

    def __init__(self, submit: Submit, tokens: array[int], num_prompt: int, limit: int, arrival: int) -> None:
        """``tokens``: prompt and emitted ids, of which ``num_prompt`` are the prompt; the sequence owns the
        array. ``limit``: number of tokens at which the sequence ends. ``arrival``: unique number, in order of
        arrival."""
        self.id, self.request, self.choice = submit.sequence, submit.request, submit.choice
        self.seed, self.salt = submit.seed, submit.salt
        self.adapter, self.place, self.adapts_experts = submit.adapter, -1, False  # see ``AdapterBook``
        self.client, self.payer = submit.client, submit.payer
        self.session = submit.session
        self.params: TokenParams = submit.params
        self.stop_ids = frozenset(submit.params.stop_ids)  # for membership only
        self.pooling = submit.pooling
        """Pooling mode of an embedding request: the sequence ends with the prompt and no token is sampled."""
        self.media = submit.media
        """Images of the prompt. The pixels are retained to the end, because an image may be encoded again."""
        self.media_ends = {item.key: item.start + item.count for item in self.media}
        """Image key -> position behind the last item with the key. Items are in order, so the last wins."""
        self.spans = EMPTY
        """Positions of the images, as in ``AllocSlot``."""
        self.tokens, self.num_prompt = tokens, num_prompt
        self.transfer = submit.transfer
        """Transfer parameters if one group prefills the sequence and another group decodes the sequence."""
        self.limit = limit
        """Number of tokens (prompt and output) at which the sequence ends with "length"."""
        self.owner = submit.owner or submit.request
        self.key = (submit.priority, arrival, arrival)
        """(priority, queue position, arrival): the scheduling order, kept across preemptions. The share sets
        the position."""
        self.share: OwnerShare | None = None
        """Fair share of the client request; None before arrival and after the end."""
        self.prompt_logprobs = num_prompt - 1 if _wants_prompt(submit, num_prompt, len(tokens)) else 0
        """Number of leading positions with prompt logprobs to compute. 0 if output exists: delivered by an
        earlier attempt."""
        self.logit_cost = 1  # part of a step's budget for prompt logprobs that one position takes
        self.side_bytes = 0  # beside KV on each rank while the sequence runs, see ``planner.SIDE_BYTES``
        self.delivered = 0
        """Number of positions already sent."""
        self.weights = b""  # name of the weights in the root of ``chain``, or ``MIXED``
        self.chain: HashChain | None = None
        self.num_cached = -1
        """Number of prompt tokens found in the cache at the first admission; -1 before the first
        admission."""
        self.preemptions = self.yielded = 0
        """Number of preemptions; number of preemptions in favor of another sequence."""
        self.forced = submit.forced  # experts that replace the choice of the router
        self.routed = _first_route(submit, num_prompt, len(tokens))  # first position without known routes
        self.explains = submit.explain
        self.miss: CacheMiss | None = None
        """Why the prompt was not cached further; None once reported."""
        self.losses = (0, 0)
        """(losses of the group in a row without a new token, number of tokens at the last loss)."""
        self.constraint: Constraint | None = None
        """Position in the compiled grammar; None without a grammar or before compilation."""
        self.blocked = False
        """True while external input is missing; the sequence cannot be admitted."""
        self.blocked_images = False
        """True while images from an encode group are missing; the sequence cannot be admitted."""
        self.loading, self.loads_left = False, 2  # see ``Loads.block``: at the arrival, at the admission
        self.relies = False
        """True if this group cannot encode all images of the prompt again."""
        self.state: State = BlockedOnFirstSample()

    def move(self, state: State) -> None:
        """Enter ``state``. Raises EngineDead if ``TRANSITIONS`` does not allow the transition."""
        if type(state) not in TRANSITIONS[type(self.state)]:
            raise EngineDead(
                f"a sequence cannot go from {type(self.state).__name__} to {type(state).__name__}"
            )
        self.state = state

    @property
    def protected(self) -> bool:
        """True after ``PROTECT_AFTER`` preemptions for lack of blocks: see there."""
        return self.preemptions - self.yielded >= PROTECT_AFTER

    @property
    def newcomer(self) -> bool:
        """True before the first admission."""
        return self.num_cached < 0

    def lost(self) -> bool:
        """Count one loss of the group while the sequence ran. Return True after ``MOST_LOSSES`` losses in a
        row.

        A new token since the last loss resets the count.
        """
        times, tokens = self.losses
        times = times + 1 if tokens == len(self.tokens) else 1
        self.losses = (times, len(self.tokens))
        return times >= MOST_LOSSES

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def tables(self) -> FetchedTables | None:
        """Block tables without a slot; None if the sequence has none."""
        return self.state.tables if isinstance(self.state, Fetching | Waiting) else None

    @property
    def sends(self) -> bool:
        """True if the sequence ends here with the first token and another group decodes the rest."""
        return self.transfer is not None and self.transfer.sends

    @property
    def fetches(self) -> bool:
        """True if another group prefills the sequence."""
        return self.transfer is not None and not self.transfer.sends

    @property
    def position(self) -> int:
        """Number of output tokens for events of a sequence with a transfer; -1 for other sequences."""
        return -1 if self.transfer is None else self.num_output

    def may_skip(self) -> int:
        """Return the number of leading positions that need not be computed if the cache has them.

        The last known id is always computed. Pooling by mean or cls needs all positions. Prompt logprobs
        need all positions not delivered yet, and routes all positions whose routes are not known yet.
        """
        most = 0 if self.pooling in ("mean", "cls") else len(self.tokens) - 1
        if self.routed >= 0:
            most = min(most, self.routed)
        return min(most, self.delivered) if self.delivered < self.prompt_logprobs else most

    def report_routes(self, start: int, ids: np.ndarray) -> Routes | None:
        """Return the routes to report for committed positions from ``start`` on, uint16 [positions, layers,
        top_k]. Positions reported before a preemption are dropped; None if no other position is left."""
        new = Routes(start=start, layers=ids.shape[1], top_k=ids.shape[2], ids=ids.tobytes())
        fresh = new.part(self.routed, new.end) if self.routed >= 0 else None
        self.routed = self.routed if fresh is None else fresh.end
        return fresh

    def take(self, token: int) -> None:
        """Append the next output token and advance the grammar."""
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.take(token)

    def ending(self) -> tuple[str, int | None] | None:
        """Return (finish reason, stop id) if the tokens so far end the sequence, else None."""
        output = self.num_output
        constraint = self.constraint
        if constraint is not None and constraint.failure is not None:
            return "error", None
        # A stop id counts only after at least min_tokens tokens before it.
        if output > self.params.min_tokens and self.tokens[-1] in self.stop_ids:
            return "stop", self.tokens[-1]
        if constraint is not None and constraint.finished:
            return "stop", None
        if len(self.tokens) >= self.limit:
            return "length", None
        return None

    def alloc(self, run: Running, num_cached: int) -> AllocSlot:
        """Return the slot update to assign the slot of ``run``."""
        return AllocSlot(
            slot=run.slot,
            gen=run.gen,
            choice=self.choice,
            seed=self.seed,
            params=self.params,
            num_prompt=self.num_prompt,
            num_cached=num_cached,
            adapter=self.place,
            token_ids=column(np.array(self.tokens, np.int32)),  # a copy: the array keeps growing
            pooling=self.pooling,
            routes=self.routed >= 0,
            forced=self.forced,
            spans=self.spans,
        )

    def prefill_logits(self, start: int, end: int) -> tuple[int, int]:
        """Return (logits, sample) of a prefill row over ``start`` .. ``end`` - 1: the number of trailing
        positions with logits, and the number of trailing positions that sample (0 or 1)."""
        sample = int(end == len(self.tokens) and not self.pooling)
        if self.delivered < self.prompt_logprobs:
            return max(end - max(start, self.delivered), 0), sample
        return sample, sample


def _wants_prompt(submit: Submit, num_prompt: int, known: int) -> bool:
    """Return True if the sequence computes prompt logprobs. ``known``: prompt and emitted tokens."""
    # Parallel samples have the same prompt logprobs, so only choice 0 computes prompt logprobs.
    wanted = submit.params.prompt_logprobs >= 0 and submit.choice == 0 and known == num_prompt
    return wanted and not submit.pooling


def _first_route(submit: Submit, num_prompt: int, known: int) -> int:
    """Return the first position whose routes this group reports; -1 for none. ``known``: prompt and emitted
    tokens."""
    if submit.routes < 0:
        return -1
    if submit.transfer is not None and not submit.transfer.sends:
        return known  # the other group reports the positions that it computes
    # The first sample reports the shared prompt.
    return max(submit.routes, num_prompt - 1) if submit.choice else submit.routes


@dataclass(slots=True, eq=False)
class LiveRequest:
    """The live sequences of one prompt. The first sample computes the prompt; parallel samples wait for the
    prompt."""

    first_sample: Sequence
    members: dict[int, Sequence] = field(default_factory=dict)
    prompt_computed: bool = False
    shared: bool = False
    """True once two members were live: members share the prompt blocks, also without prefix caching."""


@dataclass(slots=True, eq=False)
class OwnerShare:
    """The sequences of one client request at one priority. Compared by identity; only ``FairQueue`` changes a
    share."""

    priority: int
    number: int
    """Number of shares that arrived earlier."""
    arrived: int = 0
    """Total number of sequences ever added to the share."""
    live: int = 0
    running: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    """Waiting sequences by key."""
    invited: Sequence | None = None
    """The waiting sequence for which another share gives up a slot; None without such a sequence."""
    place: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Place in the queue while sequences wait: (priority, running, queue position, arrival). ``running`` is
    -1 while a sequence is invited."""
