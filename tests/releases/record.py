"""Record the messages between an API server and an engine, as the code of the present commit sends them.

    python -m tests.releases.record > tests/releases/version1.json

Run in a worktree of a release. The file has the dialogue of a real fleet with a real engine protocol, one
message of each type with all fields set, and the schema of each message.
"""

from __future__ import annotations

import json
import subprocess
import types
import typing
from typing import Any

import msgspec

from weft.common.errors import EngineDead
from weft.control.directory.record import EngineRecord
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.types import messages as m
from weft.types import transfer
from weft.types.sampling import TokenParams

FRONT, NAME, LINK = b"front", "decode0", 1
TRANSFERS = typing.get_args(transfer.TransferMessage)
"""The messages between engines of one release or of two."""
PROMPT, OUTPUT = [3, 1, 4, 1, 5], [11, 12, 13]


class TinyEngine:
    """An engine that answers each sequence with ``OUTPUT``, one token a step."""

    recovering = False

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        """Sequence -> number of tokens sent."""

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        """Begin a sequence. Tokens that were emitted before are not sent again."""
        self.live[submit.sequence] = len(m.ids_from_bytes(submit.emitted_ids))
        return []

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        """End a sequence."""
        ended = self.live.pop(sequence, None) is not None
        return [m.TokenEvent(sequence=sequence, finish="abort")] if ended else []

    def has_work(self) -> bool:
        """Return True if a sequence is live."""
        return bool(self.live)

    def stats(self) -> m.EngineStats:
        """Return constant counters, with every kind of value."""
        transfers = m.TransferStats(done=3, took=m.Measures().add(m.SECONDS, 0.2))
        return m.EngineStats(
            steps=5, running=1, kv_usage=0.25, drafts=(4, 2), free_blocks=(7, 8), transfers=transfers
        )

    def welcome(self, incarnation: int) -> m.Welcome:
        """Return a description of the engine."""
        return m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=100,
            max_model_len=64,
            max_num_seqs=4,
            num_blocks=(9,),
            incarnation=incarnation,
            block_size=16,
        )

    def follow_prefixes(self) -> None:
        """Return None: there is no prefix cache."""

    def step(self) -> list[m.TokenEvent]:
        """Return one token of each live sequence."""
        events = []
        for sequence, sent in list(self.live.items()):
            last = sent + 1 == len(OUTPUT)
            finish = "length" if last else None
            events.append(m.TokenEvent(sequence=sequence, token_ids=(OUTPUT[sent],), finish=finish))
            if last:
                del self.live[sequence]
            else:
                self.live[sequence] += 1
        return events


class Dialogue:
    """A fleet and an engine protocol that exchange frames."""

    def __init__(self) -> None:
        self.engine = TinyEngine()
        self.protocol = EngineProtocol(self.engine, 7)
        self.fleet = Fleet({NAME: ""}, Patience(), front="front")
        self.frames: list[tuple[str, str]] = []
        """(sender, frame in hex), in order."""
        self.delivered: list[m.TokenEvent] = []

    def on(self, event: e.Event) -> None:
        """Give the fleet an event, and carry messages until both sides are silent."""
        for action in self.fleet.on(event, float(len(self.frames))):
            if isinstance(action, e.Deliver):
                self.delivered += action.events
            elif isinstance(action, e.Send):
                self._to_engine(m.encode(action.message))

    def _to_engine(self, frame: bytes) -> None:
        self.frames.append(("API server", frame.hex()))
        self.answer(self.protocol.on(FRONT, m.decode_to_engine(frame)))

    def answer(self, outgoing: list[tuple[bytes, m.ToFront]]) -> None:
        """Carry messages of the engine to the fleet."""
        for _, message in outgoing:
            frame = m.encode(message)
            self.frames.append(("engine", frame.hex()))
            self.on(e.Received(NAME, LINK, m.decode_to_front(frame)))

    def play(self) -> None:
        """Connect, run one sequence to its end, end another one early, and close."""
        for event in opening():
            self.on(event)
        for _ in OUTPUT:
            self.answer(self.protocol.events(self.engine.step(), 1))
        self.on(e.Opened((submit(2),)))
        self.answer(self.protocol.events(self.engine.step(), 2))
        self.on(e.Closed((2,)))
        self.answer(self.protocol.heartbeats())
        self.on(e.Closing(shutdown=False))


def opening() -> list[e.Event]:
    """Return the events up to the first request."""
    begin = [e.Expected(NAME, LINK), e.Located(NAME, LINK), e.Linked(NAME, LINK)]
    return [*begin, e.Opened((submit(1),))]


def submit(sequence: int) -> m.Submit:
    """Return a Submit of ``PROMPT``."""
    return m.Submit(
        sequence=sequence,
        request=sequence,
        seed=9,
        prompt_ids=m.ids_to_bytes(PROMPT),
        params=TokenParams(max_tokens=len(OUTPUT)),
    )


def samples(union: Any) -> list[str]:
    """Return one frame in hex of each message type, with a value in every field."""
    return [m.encode(example(kind)).hex() for kind in typing.get_args(union)]


def example(kind: Any) -> Any:
    """Return a value of the type ``kind``. Optional values and fields with defaults are set, too."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{one.name: example(hints[one.name]) for one in msgspec.structs.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return kind(*(example(one) for one in typing.get_type_hints(kind).values()))
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return example(next(one for one in arguments if one is not type(None)))
    if origin is tuple:
        return (example(arguments[0]),) if arguments[-1] is Ellipsis else tuple(map(example, arguments))
    if origin is dict:
        return {example(arguments[0]): example(arguments[1])}
    if origin is not None and hasattr(kind, "__metadata__"):  # Annotated
        return example(arguments[0])
    return {int: 3, float: 0.5, str: "x", bytes: b"\1\0\0\0", bool: True, list: []}[kind]


def schema(kinds: list[Any]) -> dict[str, Any]:
    """Return struct -> schema, for ``kinds`` and all structs inside: the fields with the structs of their
    values, the required fields, and whether the struct is sent as an array."""
    found: dict[str, Any] = {}
    while kinds:
        kind = kinds.pop()
        if kind.__name__ in found:
            continue
        hints, own = typing.get_type_hints(kind), msgspec.structs.fields(kind)
        inner = {one.encode_name: _structs(hints[one.name]) for one in own}
        found[kind.__name__] = {
            "fields": {name: [other.__name__ for other in others] for name, others in inner.items()},
            "required": [one.encode_name for one in own if one.required],
            "array": kind.__struct_config__.array_like,
        }
        kinds += [other for others in inner.values() for other in others]
    return dict(sorted(found.items()))


def _structs(kind: Any) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [found for one in typing.get_args(kind) for found in _structs(one)]


def main() -> None:
    """Print the recording."""
    dialogue = Dialogue()
    dialogue.play()
    failed = m.EngineFailed(error=EngineDead("the engine failed").info())
    record = EngineRecord(
        name=NAME, incarnation=7, endpoint="tcp://127.0.0.1:5", model="m", role="decode", ready=True
    )
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    kinds = [*typing.get_args(m.ToEngine), *typing.get_args(m.ToFront)]
    recording = {
        "commit": commit,
        "dialogue": dialogue.frames,
        "failed": m.encode(failed).hex(),
        "to_engine": samples(m.ToEngine),
        "to_front": samples(m.ToFront),
        "transfers": [transfer.encode(example(kind)).hex() for kind in TRANSFERS],
        "record": msgspec.json.encode(record).decode(),
        "schema": schema(kinds),
    }
    print(json.dumps(recording, indent=1))


if __name__ == "__main__":
    main()
