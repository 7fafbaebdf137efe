"""The engine's side of the messages, over a real scheduler, without a socket."""

from __future__ import annotations

from testing.cluster.check import TokenModel
from testing.cluster.engine_process import Engine
from weft.common.clock import VirtualClock
from weft.common.errors import InvalidRequest
from weft.config.sections.all import SchedulerSection
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.sim.engine import kv_config
from weft.types import messages as m
from weft.types.adapters import AdapterChanged, DropAdapter, LoadAdapter
from weft.types.sampling import TokenParams
from weft.types.weights import StageWeights, WeightsChanged, WeightsUpdate


def engine() -> EngineProtocol:
    section = SchedulerSection(max_num_seqs=2, max_num_batched_tokens=16, max_queued_requests=2)
    kv = kv_config(section, 24, block_size=4)
    return EngineProtocol(Engine(kv, section, TokenModel({}, {}), VirtualClock()), 7)


def hello(front: str) -> m.Hello:
    return m.Hello(versions=(m.OLDEST, m.VERSION), front=front)


def submit(sequence: int, attempt: int = 0) -> m.Submit:
    params = TokenParams(max_tokens=4)
    ids = m.ids_to_bytes([1, 2])
    return m.Submit(
        sequence=sequence, request=sequence, seed=1, prompt_ids=ids, params=params, attempt=attempt
    )


def test_a_front_that_connects_again_takes_its_sequences_over() -> None:
    """The former connection broke, and the engine has not noticed yet."""
    one = engine()
    one.on(b"old", hello("front"))
    assert one.on(b"old", submit(1)) == []
    assert one.on(b"old", submit(2)) == []
    one.on(b"new", hello("front"))
    assert one.on(b"new", submit(1, attempt=1)) == []
    event = m.TokenEvent(sequence=1, token_ids=(5,))
    delivered = m.TokenEvent(sequence=1, token_ids=(5,), attempt=1)
    assert one.events([event]) == [(b"new", m.Tokens(step=-1, events=(delivered,)))]
    assert one.events([m.TokenEvent(sequence=2, token_ids=(5,))]) == []  # left with the connection
    one.forget(b"old")
    assert one.on(b"new", m.Finish(sequence=1)) != []


def test_another_front_with_the_same_id_is_refused_and_disturbs_nobody() -> None:
    one = engine()
    for name in ("one", "other"):
        one.on(name.encode(), hello(name))
    one.on(b"one", submit(1))
    ((front, answer),) = one.on(b"other", submit(1, attempt=3))
    assert front == b"other"
    assert isinstance(answer, m.Tokens)
    assert [event.finish for event in answer.events] == ["error"]
    ((front, _),) = one.events([m.TokenEvent(sequence=1, token_ids=(5,))])
    assert front == b"one"


def test_a_submit_that_comes_twice_is_dropped_and_a_later_attempt_ends_the_earlier_one() -> None:
    one = engine()
    one.on(b"front", hello("front"))
    assert one.on(b"front", submit(1)) == []
    assert one.on(b"front", submit(1)) == []
    assert one.bad_frames == 1
    assert one.on(b"front", submit(1, attempt=2)) == []
    assert one.on(b"front", submit(1, attempt=1)) == []
    ((_, answer),) = one.events([m.TokenEvent(sequence=1, token_ids=(5,))])
    assert isinstance(answer, m.Tokens)
    assert [event.attempt for event in answer.events] == [2]


def test_the_end_of_a_front_ends_its_own_sequences_alone() -> None:
    one = engine()
    for name in ("one", "other"):
        one.on(name.encode(), hello(name))
    one.on(b"one", submit(1))
    one.on(b"other", submit(2))
    one.on(b"one", m.Goodbye())
    assert not one.stopped
    delivered = one.events([m.TokenEvent(sequence=s, token_ids=(5,)) for s in (1, 2)])
    assert [front for front, _ in delivered] == [b"other"]


def test_adapters_are_answered_to_the_sender() -> None:
    class Loader:
        """Answers a load at the second look."""

        def begin(self, message: m.ToAdapters) -> AdapterChanged | None:
            if isinstance(message, LoadAdapter):
                return None
            return AdapterChanged(digest=message.digest, loaded=False)

        def finished(self) -> list[AdapterChanged]:
            return [AdapterChanged(digest="d" * 32, loaded=True)]

    load = LoadAdapter(name="a", digest="d" * 32, folder="/a")
    one = engine()
    one.on(b"f", m.Hello(versions=(m.OLDEST, m.VERSION), front="f"))
    ((front, refused),) = one.on(b"f", load)
    assert front == b"f"
    assert isinstance(refused, AdapterChanged)
    assert (refused.loaded, refused.error is None) == (False, False)
    one._adapters = Loader()
    one.on(b"g", m.Hello(versions=(m.OLDEST, m.VERSION), front="g"))
    one.on(b"gone", m.Hello(versions=(m.OLDEST, m.VERSION), front="gone"))
    assert one.adapters_changed() == []
    assert [one.on(front, load) for front in (b"f", b"g", b"gone")] == [[], [], []]
    one.forget(b"gone")
    due = AdapterChanged(digest=load.digest, loaded=True)
    assert one.adapters_changed() == [(b"f", due), (b"g", due)]
    assert one.adapters_changed() == []
    dropped = m.decode_to_engine(m.encode(DropAdapter(digest=load.digest)))
    assert one.on(b"f", dropped) == [(b"f", AdapterChanged(digest=load.digest, loaded=False))]


def test_a_drop_ends_a_load_before_the_next_load() -> None:
    """Otherwise the error of the dropped load would answer a second load of the same adapter."""
    digest = "d" * 32
    refused = AdapterChanged(digest=digest, loaded=False, error=InvalidRequest("dropped").info())

    class Loader:
        ended: list[AdapterChanged]

        def begin(self, message: m.ToAdapters) -> AdapterChanged | None:
            if isinstance(message, LoadAdapter):
                return None
            self.ended = [refused]
            return AdapterChanged(digest=message.digest, loaded=False)

        def finished(self) -> list[AdapterChanged]:
            made, self.ended = self.ended, []
            return made

    one = engine()
    one._adapters = Loader()
    one.on(b"f", m.Hello(versions=(m.OLDEST, m.VERSION), front="f"))
    assert one.on(b"f", LoadAdapter(name="a", digest=digest, folder="/a")) == []
    gone = AdapterChanged(digest=digest, loaded=False)
    assert one.on(b"f", DropAdapter(digest=digest)) == [(b"f", refused), (b"f", gone)]
    assert one.on(b"f", LoadAdapter(name="a", digest=digest, folder="/a")) == []
    assert one.adapters_changed() == []


def test_an_api_server_that_is_gone_gives_its_update_of_weights_up() -> None:
    """An API server that changes no weights gives nothing up."""

    class Weights:
        def __init__(self) -> None:
            self.delivered: list[object] = []

        def begin(self, message: m.ToWeights) -> None:
            self.delivered.append(message)

        def finished(self) -> list[WeightsChanged]:
            return []

        def leave(self) -> None:
            self.delivered.append("left")

    one = engine()
    one._weights = weights = Weights()
    for name in ("carrier", "other"):
        one.on(name.encode(), m.Hello(versions=(m.OLDEST, m.VERSION), front=name))
    stage = StageWeights(update=WeightsUpdate(version=1, files=("/a",)))
    one.on(b"carrier", stage)
    one.on(b"other", m.Goodbye())
    assert weights.delivered == [stage]
    one.forget(b"carrier")
    one.forget(b"carrier")
    assert weights.delivered == [stage, "left"]


def test_api_servers_share_the_latest_pause_through_an_engine() -> None:
    one = engine()

    def say(name: str, pause: str | None) -> dict[bytes, tuple[str, tuple[str, ...]]]:
        """Return pause and names in each Welcome after a Hello."""
        hello = m.Hello(versions=(m.OLDEST, m.VERSION), front=name, pause=pause)
        answers = one.on(name.encode(), hello)
        return {to: (a.pause, a.behind) for to, a in answers if isinstance(a, m.Welcome)}

    assert say("a", "") == {b"a": ("", ())}
    assert say("b", "") == {b"b": ("", ())}
    assert say("old", None) == {b"old": ("", ())}  # shares no pause
    assert say("a", "2 a keep") == {b"a": ("2 a keep", ("b",)), b"b": ("2 a keep", ())}
    assert say("b", "1 b keep") == {b"b": ("2 a keep", ())}
    assert say("a", "2 a keep") == {b"a": ("2 a keep", ("b",))}
    assert say("b", "2 a keep") == {b"b": ("2 a keep", ())}
    assert say("a", "2 a keep") == {b"a": ("2 a keep", ())}
    for wrong, shown in (("wrong", "2 a keep"), ("-3 c keep", "2 a keep"), ("9" * 500, "")):
        assert say("c", wrong) == {b"c": (shown, ())}
    one.forget(b"c")
    assert say("late", "") == {b"late": ("2 a keep", ())}
    assert say("late", "3 late -")[b"a"] == ("3 late -", ("b",))
