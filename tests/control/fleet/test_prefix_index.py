"""Reports of engines about their prefix caches, and their use in API servers."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.fleet.driver import Driver
from weft.control.fleet import fleet_events as e
from weft.control.fleet import prefix_index
from weft.control.fleet.policy import make_policies
from weft.control.fleet.prefix_index import PrefixReports, PrefixView
from weft.kv.hashing import prompt_hashes
from weft.kv.prefix_log import PrefixLog
from weft.types import messages as m
from weft.types.sampling import TokenParams

A, B, C = (bytes([n]) * 16 for n in range(3))
PROMPT = m.ids_to_bytes(list(range(64, 64 + 12)))
BLOCKS = prompt_hashes(PROMPT, "", 4)


class Engine:
    def __init__(self, log: PrefixLog | None, positions: int = 4) -> None:
        self.followed = None if log is None else (log, positions)
        self.calls = 0

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        self.calls += 1
        return self.followed


def test_a_new_watcher_gets_the_whole_index_and_then_changes() -> None:
    log = PrefixLog([A])
    engine = Engine(log)
    reports = PrefixReports(engine)
    assert reports.changes() == []
    assert not engine.calls, "nothing is followed before a front asks"
    ((front, whole),) = reports.watch(b"one")
    assert (front, whole) == (b"one", m.PrefixIndex(number=0, whole=True, positions=4, added=A))
    log.add(B)
    log.remove(A)
    (to_one, to_other) = reports.watch(b"other")
    assert to_one == (b"one", m.PrefixIndex(number=1, positions=4, added=B, removed=A))
    assert to_other == (b"other", m.PrefixIndex(number=1, whole=True, positions=4, added=B))
    assert reports.changes() == []
    log.add(C)
    assert {front for front, _ in reports.changes()} == {b"one", b"other"}
    reports.forget(b"one")
    log.remove(C)
    assert [(front, report.number, report.removed) for front, report in reports.changes()] == [
        (b"other", 3, C)
    ]


def test_an_engine_without_a_prefix_cache_reports_no_prefixes() -> None:
    reports = PrefixReports(Engine(None))
    assert reports.watch(b"one") == []
    assert reports.changes() == []


def test_a_view_knows_nothing_from_a_gap_until_all_is_told_again() -> None:
    view = PrefixView()
    assert not view.known
    assert not view.take(m.PrefixIndex(number=4, positions=4, added=A)), "changes of what was never told"
    assert view.take(m.PrefixIndex(number=4, whole=True, positions=4, added=A + B))
    assert view.known
    assert view.take(m.PrefixIndex(number=5, positions=4, added=C, removed=A))
    assert (A in view, B in view, C in view, view.removed) == (False, True, True, (A,))
    assert not view.take(m.PrefixIndex(number=7, positions=4, added=A)), "number 6 was missed"
    assert not view.known
    assert len(view) == 0
    assert not view.take(m.PrefixIndex(number=8, positions=4))
    assert view.take(m.PrefixIndex(number=8, whole=True, positions=4, added=C))
    assert C in view
    assert B not in view


def test_too_many_keys_are_not_kept_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MOST_KEYS", 2)
    view = PrefixView()
    assert view.take(m.PrefixIndex(number=0, whole=True, positions=4, added=A + B + C))
    assert not view.known
    assert view.take(m.PrefixIndex(number=1, positions=4, added=A)), "it asks no more"
    assert len(view) == 0


def fleet() -> Driver:
    """Return a fleet of engines with blocks of 4 tokens, which have reported empty caches."""
    driver = Driver("a", "b", policies=make_policies())
    for name in ("a", "b"):
        driver.expect(name)
        driver.on(e.Linked(name, driver.link[name]))
        driver.say(name, msgspec.structs.replace(driver.welcome(name), block_size=4))
        assert m.WatchPrefixes() in driver.sent()
        driver.say(name, m.PrefixIndex(number=0, whole=True, positions=4))
    return driver


def ask(driver: Driver, sequence: int, prompt: bytes = PROMPT) -> str | None:
    submit = m.Submit(
        sequence=sequence,
        request=sequence,
        seed=1,
        prompt_ids=prompt,
        params=TokenParams(max_tokens=4),
    )
    driver.on(e.Opened((submit,)))
    places = {action.instance for action in driver.of(e.Send)}
    return places.pop() if len(places) == 1 else None


def test_a_prompt_goes_where_it_is_cached_though_this_front_never_sent_it_there() -> None:
    driver = fleet()
    driver.say("b", m.PrefixIndex(number=1, positions=4, added=b"".join(BLOCKS)))
    assert ask(driver, 1) == "b"
    assert driver.fleet.router.decisions == {"exact": 1, "degraded": 0, "fallback": 0}


def test_evicted_prefixes_no_longer_count() -> None:
    driver = fleet()
    assert ask(driver, 1) == "a"
    driver.tokens("a", 1, 5, finish="length")
    driver.say("a", m.PrefixIndex(number=1, positions=4, added=b"".join(BLOCKS)))
    assert ask(driver, 2) == "a"
    driver.tokens("a", 2, 5, finish="length")
    driver.say("a", m.PrefixIndex(number=2, positions=4, removed=b"".join(BLOCKS)))
    assert ask(driver, 3) == "b", "of equal loads the one chosen least often"


def test_uncached_prefixes_are_forgotten_when_the_engine_is_idle() -> None:
    driver = fleet()
    assert ask(driver, 1) == "a"
    driver.on(e.Closed((1,)))  # before the prompt was computed
    driver.say("a", m.Heartbeat(idle=True, stats=m.EngineStats(steps=1)))
    assert ask(driver, 2) == "b"


def test_prefixes_still_to_be_computed_are_not_forgotten() -> None:
    """An idle engine may have sequences as well: blocked ones, and ones in flight."""
    driver = fleet()
    long = m.ids_to_bytes(list(range(2000)))
    assert ask(driver, 1, long) == "a"
    assert [ask(driver, number) for number in (2, 3, 4)] == ["b"] * 3
    driver.say("a", m.Heartbeat(idle=True, stats=m.EngineStats(waiting=1)))
    assert ask(driver, 5, long) == "a"


@pytest.mark.requirement("E32")
def test_a_gap_is_asked_about_and_decisions_say_what_was_known() -> None:
    driver = fleet()
    driver.say("b", m.PrefixIndex(number=2, positions=4, added=A))
    assert driver.sent() == [m.WatchPrefixes()]
    ask(driver, 1)
    assert driver.fleet.router.decisions == {"exact": 0, "degraded": 1, "fallback": 0}
    driver.say("b", m.PrefixIndex(number=2, whole=True, positions=4, added=b"".join(BLOCKS)))
    assert driver.sent() == []
    ask(driver, 2)
    assert driver.fleet.router.decisions == {"exact": 1, "degraded": 1, "fallback": 0}


def test_another_process_of_an_engine_begins_with_nothing() -> None:
    driver = fleet()
    driver.say("b", m.PrefixIndex(number=1, positions=4, added=b"".join(BLOCKS)))
    driver.lose("b")
    driver.expect("b")
    driver.on(e.Linked("b", driver.link["b"]))
    driver.say("b", driver.welcome("b"))
    assert not driver.fleet.table.instances["b"].prefixes.known
    assert ask(driver, 1) == "a"


def test_keys_of_several_blocks_count_at_their_multiples() -> None:
    driver = fleet()
    driver.say("b", m.PrefixIndex(number=1, whole=True, positions=8, added=BLOCKS[1]))
    assert ask(driver, 1) == "b"
    driver = fleet()
    driver.say("b", m.PrefixIndex(number=1, whole=True, positions=8, added=BLOCKS[0]))
    assert ask(driver, 1) == "a", "the first key is behind the second block"
