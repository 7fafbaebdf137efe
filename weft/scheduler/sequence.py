"""A sequence and its states. The state object owns the sequence's slot and block tables.

                      ╭──> Fetching ──╮
AwaitingLeader ──> Awaiting ──────> Waiting ──> Running
   │  │               │             ^ │ ^─preempted─╯ │
   │  ╰───────────────┼─────────────╯ │               │
   ╰──────────────────┴───────────────┴──> Ended <────╯

Running owns a slot and its block tables. Fetching owns block tables without a slot, and so does Waiting after
it, until a slot adopts them. All other states own nothing. Any state but Ended may end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from weft.common.errors import EngineDead
from weft.common.restarts import MOST_LOSSES
from weft.kv.hashing import HashChain
from weft.kv.snapshots import Marks
from weft.scheduler.constraints import Constraint
from weft.scheduler.slot_columns import SlotColumns
from weft.types.messages import CacheMiss, Submit
from weft.types.plan import EMPTY, AllocSlot, column
from weft.types.sampling import TokenParams

PROTECT_AFTER = 2
"""Preemptions for want of blocks after which a sequence is admitted only with a guarantee, and never
preempted again."""
TURN = 32
"""Tokens that a sequence may generate before a newcomer may take its slot."""
MOST_YIELDS = 4
"""Most times that a sequence gives up its slot for others."""


@dataclass(frozen=True, slots=True)
class AwaitingLeader:
    """Waits until the leader of its request has computed the prompt that both share."""


@dataclass(frozen=True, slots=True)
class Awaiting:
    """Lacks input from outside the group, such as KV of another engine. It counts as no work, and an empty
    plan meanwhile is no lack of progress."""


@dataclass(frozen=True, slots=True)
class FetchedTables:
    """Block tables of a sequence whose cache comes, or has come, from another group."""

    number: int
    """Negative: stands for a slot where caches are asked."""
    reach: int
    """Positions that they cover at least."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Its cache is coming: it holds the blocks where that goes, and no slot. It counts as no work."""

    tables: FetchedTables


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue, for the first time or again."""

    tables: FetchedTables | None = None
    """Its cache has come: it is admitted as a decode row."""


class _Entry:
    """An attribute that is stored in the column of its name, at the object's slot."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, run: Running, owner: type) -> int:
        return int(getattr(run.columns, self._name)[run.slot])

    def __set__(self, run: Running, value: int) -> None:
        getattr(run.columns, self._name)[run.slot] = value


@dataclass(slots=True, eq=False)
class Running:
    """A sequence's time in one slot, from admission to preemption or end. Compared by identity.

    0 ... num_computed ... num_scheduled ... known        prefill rows, then
    0 ... known ... num_computed ... num_scheduled        decode rows

    What changes is in ``columns``, and the slot's next sequence writes over it: once the
    sequence has left the slot, it must not be read.
    """

    columns: SlotColumns
    slot: int
    gen: int
    known: int
    """Number of ids that AllocSlot wrote; later ids are on the device before they are here. One less where
    the cache came from another group: the last id is the first token, which goes into a decode row."""
    marks: Marks | None = None
    """Where snapshots of its recurrent state are wanted; None: nowhere."""

    num_computed = _Entry()
    """Positions computed by committed steps."""
    num_scheduled = _Entry()
    """Positions computed once all planned steps are done."""
    reserved = _Entry()
    """Positions that the block tables cover."""
    last_step = _Entry()
    """The last plan that names the slot; the slot and its blocks are free when it has committed."""
    exact = _Entry()
    snapshot = _Entry()

    @property
    def prefilling(self) -> bool:
        return self.num_scheduled < self.known


@dataclass(frozen=True, slots=True)
class Ended:
    """Has had its one terminal event."""

    finish: str


State = AwaitingLeader | Awaiting | Fetching | Waiting | Running | Ended

TRANSITIONS: dict[type, tuple[type, ...]] = {
    AwaitingLeader: (Awaiting, Waiting, Ended),
    Awaiting: (Fetching, Waiting, Ended),
    Fetching: (Waiting, Ended),
    Waiting: (Running, Ended),
    Running: (Waiting, Ended),
    Ended: (),
}


class Sequence:
    """One token stream. ``tokens`` is prompt + output, as far as commits (or the client) have told."""

    __slots__ = (
        "awaits",
        "awaits_images",
        "chain",
        "choice",
        "client",
        "constraint",
        "delivered",
        "explains",
        "id",
        "key",
        "limit",
        "losses",
        "media",
        "miss",
        "num_cached",
        "num_prompt",
        "owner",
        "params",
        "pooling",
        "preemptions",
        "prompt_logprobs",
        "relies",
        "request",
        "room",
        "salt",
        "seed",
        "session",
        "share",
        "spans",
        "state",
        "stop_ids",
        "tokens",
        "yielded",
    )

    def __init__(self, submit: Submit, tokens: array[int], num_prompt: int, limit: int, arrival: int) -> None:
        self.id = submit.sequence
        self.request = submit.request
        self.choice = submit.choice
        self.seed = submit.seed
        self.salt = submit.salt
        self.client = submit.client
        self.session = submit.session
        self.params: TokenParams = submit.params
        self.stop_ids = frozenset(submit.params.stop_ids)  # for membership only
        self.pooling = submit.pooling
        """Of an embedding: it ends with its prompt, and no token is drawn."""
        self.media = submit.media
        """The images of its prompt, kept with their pixels to its end: they may be encoded again."""
        self.spans = EMPTY
        """As in ``AllocSlot``."""
        self.tokens = tokens
        self.num_prompt = num_prompt
        self.room = submit.room
        """Where another group decodes what this one prefills, or the other way round."""
        self.limit = limit
        """Tokens, prompt and output, at which the sequence ends with "length"."""
        self.owner = submit.owner or submit.request
        self.key = (submit.priority, arrival, arrival)
        """(priority, turn, arrival): the order of sequences; survives preemption. Its share sets the turn."""
        self.share: OwnerShare | None = None
        """From arrival to the end."""
        wanted = submit.params.prompt_logprobs >= 0 and submit.choice == 0 and len(tokens) == num_prompt
        wanted = wanted and not submit.pooling
        self.prompt_logprobs = num_prompt - 1 if wanted else 0
        """Leading positions whose prompt logprobs this sequence computes. Only choice 0 does; with output
        emitted already they were delivered before."""
        self.delivered = 0
        """How many of these positions were sent."""
        self.chain: HashChain | None = None
        self.num_cached = -1
        """Prompt tokens found in the cache at the first admission; -1 before it."""
        self.preemptions = 0
        self.yielded = 0
        """Preemptions that made room for another sequence."""
        self.explains = submit.explain
        self.miss: CacheMiss | None = None
        """Why its prompt was not found further in the cache, until it is told."""
        self.losses = (0, 0)
        """(losses of the group while it ran, tokens when they began)."""
        self.constraint: Constraint | None = None
        """Where it is in the grammar of its output, if it has one and that was compiled."""
        self.awaits = False
        """Whether something is missing that comes from outside; it cannot be admitted meanwhile."""
        self.awaits_images = False
        """Whether images of its prompt are still to come from groups that encode; likewise."""
        self.relies = False
        """Whether it computes a prompt with images that cannot be encoded here again."""
        self.state: State = AwaitingLeader()

    def move(self, state: State) -> None:
        """Enters ``state``. Raises EngineDead when the table has no such transition."""
        if type(state) not in TRANSITIONS[type(self.state)]:
            raise EngineDead(
                f"a sequence cannot go from {type(self.state).__name__} to {type(state).__name__}"
            )
        self.state = state

    @property
    def protected(self) -> bool:
        """Whether it was preempted for want of blocks often enough to be never preempted again."""
        return self.preemptions - self.yielded >= PROTECT_AFTER

    @property
    def newcomer(self) -> bool:
        """Whether it never had a slot."""
        return self.num_cached < 0

    def lost(self) -> bool:
        """Counts that its group was lost while it ran. Returns whether that happened too often."""
        times, tokens = self.losses
        times = times + 1 if tokens == len(self.tokens) else 1
        self.losses = (times, len(self.tokens))
        return times >= MOST_LOSSES

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def tables(self) -> FetchedTables | None:
        """Block tables that it has without a slot."""
        return self.state.tables if isinstance(self.state, Fetching | Waiting) else None

    @property
    def sends(self) -> bool:
        """Whether it ends here with its first token, and another group goes on with its cache."""
        return self.room is not None and self.room.sends

    @property
    def fetches(self) -> bool:
        """Whether another group prefills it."""
        return self.room is not None and not self.room.sends

    @property
    def position(self) -> int:
        """Output tokens so far, for events of a sequence with a room; -1 for others."""
        return -1 if self.room is None else self.num_output

    def may_skip(self) -> int:
        """Leading positions that need no computing if the cache has them; the last known id always does, and
        all of which a mean is made."""
        most = 0 if self.pooling == "mean" else len(self.tokens) - 1
        return min(most, self.delivered) if self.delivered < self.prompt_logprobs else most

    def take(self, token: int) -> None:
        """The next token of its output."""
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.take(token)

    def ending(self) -> tuple[str, int | None] | None:
        """(finish, stop id) when the tokens so far end the sequence."""
        output = self.num_output
        constraint = self.constraint
        if constraint is not None and constraint.failure is not None:
            return "error", None
        if output > self.params.min_tokens and self.tokens[-1] in self.stop_ids:
            return "stop", self.tokens[-1]
        if constraint is not None and constraint.finished:
            return "stop", None
        if len(self.tokens) >= self.limit:
            return "length", None
        return None

    def alloc(self, run: Running, num_cached: int) -> AllocSlot:
        """The op that gives it its slot."""
        return AllocSlot(
            slot=run.slot,
            gen=run.gen,
            choice=self.choice,
            seed=self.seed,
            params=self.params,
            num_prompt=self.num_prompt,
            num_cached=num_cached,
            token_ids=column(np.array(self.tokens, np.int32)),  # a copy: the array goes on growing
            pooling=self.pooling,
            spans=self.spans,
        )

    def prefill_logits(self, start: int, end: int) -> tuple[int, int]:
        """(logits, sample) of a prefill row over ``start .. end - 1``: trailing positions of each."""
        sample = int(end == len(self.tokens) and not self.pooling)
        if self.delivered < self.prompt_logprobs:
            return max(end - max(start, self.delivered), 0), sample
        return sample, sample


@dataclass(slots=True, eq=False)
class LiveRequest:
    """The live sequences of one request. The leader computes the prompt; the others wait for it."""

    leader: Sequence
    members: dict[int, Sequence] = field(default_factory=dict)
    prompt_computed: bool = False
    shared: bool = False
    """Whether it ever had two members: then they share the prompt's blocks, with prefix caching or without.
    """


@dataclass(slots=True, eq=False)
class OwnerShare:
    """The sequences of one owner at one priority. Compared by identity; only ``FairQueue`` changes it."""

    priority: int
    number: int
    """Number of shares that arrived before it."""
    arrived: int = 0
    """Number of sequences that it has ever had."""
    live: int = 0
    running: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    """Its waiting sequences, by key."""
    invited: Sequence | None = None
    """The waiting sequence for which another share gives up a slot, if any."""
    place: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Where it is in the queue, while it has waiting sequences: (priority, running, turn, arrival), and -1
    for ``running`` while one is invited."""
