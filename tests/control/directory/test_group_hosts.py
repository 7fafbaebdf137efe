"""The head's view of the other hosts: late, absent, lost, doubled and wrong hosts."""

from __future__ import annotations

from weft.control.directory import group_hosts as g

SETTINGS = {"weft": "1", "scheduler.max_num_seqs": "4"}


class Played:
    """A machine with a clock, and the processes that send messages."""

    def __init__(self, hosts: int = 2) -> None:
        self.machine = g.GroupHosts(SETTINGS, hosts, 0.0)
        self.now = 0.0
        self.hosts: dict[str, tuple[int, dict[str, str] | None]] = {}
        self.posted: dict[str, None] = {}
        """Entries of the store, in order of first post."""
        self.heard: dict[str, float] = {}
        self.silent: set[str] = set()
        self.leaving: set[str] = set()

    def come(self, mark: str, index: int = 1, settings: dict[str, str] | None = SETTINGS) -> None:
        self.hosts[mark] = index, settings

    def turn(self, after: float = 0.2, stranger: str = "") -> list[g.Action]:
        """Pass time, and look once."""
        self.now += after
        for mark in self.hosts:
            if mark not in self.silent:
                self.posted.setdefault(mark)
                self.heard[mark] = self.now
        seen = [
            g.HostSeen(index, mark, settings, self.now - self.heard[mark], mark in self.leaving)
            for mark, (index, settings) in ((mark, self.hosts[mark]) for mark in self.posted)
        ]
        made = self.machine.on(g.Looked(seen, stranger), self.now)
        for action in made:
            if isinstance(action, g.Forget):
                del self.posted[action.mark]  # until the next post
        return made

    def turns(self, seconds: float, stranger: str = "") -> list[g.Action]:
        return [action for _ in range(round(seconds * 5)) for action in self.turn(stranger=stranger)]


def test_a_late_host_completes_the_group() -> None:
    played = Played(3)
    assert played.turns(10) == []
    played.come("a", 1)
    assert played.turn() == [g.Answer(1, "a", "")]
    assert not played.machine.whole
    played.come("b", 2)
    assert played.turn() == [g.Answer(2, "b", "")]
    assert played.machine.whole
    assert played.turns(100) == []


def test_absent_hosts_are_named_from_time_to_time() -> None:
    played = Played(3)
    played.come("a", 1)
    delivered = [one for one in played.turns(2 * g.REMIND_S + 1) if isinstance(one, g.Missing)]
    assert delivered == [g.Missing(2, "no connection")] * 2
    wrong = played.turns(g.REMIND_S, stranger="10.0.0.9")
    assert wrong == [g.Missing(2, "a host at 10.0.0.9 has a wrong --group-secret")]


def test_a_host_that_is_lost_and_comes_back_needs_no_new_answer() -> None:
    played = Played()
    played.come("a")
    played.turn()
    played.silent.add("a")
    assert played.turns(g.AWAY_S + 1) == [g.Away(1)]
    assert not played.machine.whole
    played.silent.clear()
    assert played.turn() == []
    assert played.machine.whole


def test_another_process_takes_the_number_of_a_lost_host() -> None:
    played = Played()
    played.come("a")
    played.turn()
    played.silent.add("a")
    played.come("b")
    made = played.turns(g.AWAY_S + 1)
    assert made == [g.Forget(1, "a"), g.Answer(1, "b", "")]
    assert played.machine.whole


IN_USE = "another host has --host-index 1: give each host its own"


def test_a_dead_process_takes_no_number() -> None:
    played = Played()
    played.come("a")
    played.turn()
    played.come("b")
    played.turns(1)
    played.silent.add("b")
    assert played.turns(g.AWAY_S) == []
    played.silent.add("a")
    assert played.turns(g.AWAY_S + 1) == [g.Away(1)]
    played.silent.discard("a")
    assert played.turns(1) == []
    assert played.machine.whole


def test_a_forgotten_process_that_returns_is_refused() -> None:
    played = Played()
    played.come("a")
    played.turn()
    played.silent.add("a")
    played.come("b")
    assert g.Forget(1, "a") in played.turns(g.AWAY_S + 1)
    played.silent.discard("a")
    assert played.turns(3 * g.AWAY_S) == [g.Answer(1, "a", IN_USE)]
    assert played.machine.whole


def test_silent_processes_without_a_number_are_forgotten() -> None:
    """A refused host that is started again and again leaves nothing behind. The present host may return."""
    played = Played()
    played.come("a")
    played.turn()
    played.come("refused", settings=None)
    played.come("dead")
    played.turn()
    played.silent |= {"a", "refused", "dead"}
    made = played.turns(g.FORGET_S + 1)
    assert [one for one in made if isinstance(one, g.Forget)] == [g.Forget(1, "refused"), g.Forget(1, "dead")]
    assert set(played.posted) == {"a"}
    played.silent.discard("a")
    assert played.turn() == []
    assert played.machine.whole


def test_a_second_process_with_a_number_in_use_is_refused() -> None:
    played = Played()
    played.come("a")
    played.turn()
    played.come("b")
    made = played.turns(3 * g.AWAY_S)
    assert made == [g.Answer(1, "b", IN_USE)]
    assert played.machine.whole


def test_other_settings_another_version_and_no_such_number_are_refused() -> None:
    played = Played()
    played.come("a", settings={**SETTINGS, "scheduler.max_num_seqs": "5"})
    played.come("b", settings=None)
    played.come("c", index=2)
    played.come("d", index=0)
    answers = {one.mark: one.why for one in played.turn() if isinstance(one, g.Answer)}
    assert "--max-num-seqs" in answers["a"]
    assert "the head has 4, host 1 has 5" in answers["a"]
    assert answers["b"] == "host 1 runs another version of weft"
    assert answers["c"] == "--host-index 2: the last host of the group is 1"
    assert answers["d"] == "--host-index 0: the last host of the group is 1"
    assert not played.machine.whole
    played.come("e")
    assert played.turn() == [g.Answer(1, "e", "")]


def test_only_a_present_host_can_leave() -> None:
    played = Played()
    played.come("a")
    played.come("b", settings=None)
    played.leaving.add("b")
    played.turn()
    assert not played.machine.leaving
    played.leaving.add("a")
    played.turn()
    assert played.machine.leaving
    del played.posted["a"]
    played.silent.add("a")
    played.turn()
    assert not played.machine.leaving
