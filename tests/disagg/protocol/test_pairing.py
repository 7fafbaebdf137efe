"""The choice of a transport for two engines, in all cases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weft.common.errors import EngineDead, ErrorInfo, NoCommonTransport, TransportFailed, Unavailable
from weft.disagg.protocol import pairing
from weft.disagg.protocol.pairing import AGAIN_S, Pairing
from weft.types import transfer as r
from weft.types.transfer import Endpoint, Peer, TransferKey

PEER, OTHER = Peer("a", 1), Peer("b", 2)
BROKEN = TransportFailed("the connection broke").info()
DROPPED = Unavailable("a write was dropped: the transfer has ended").info()


class Files:
    """Unix sockets that this process can or cannot reach."""

    def __init__(self, *reachable: str) -> None:
        self.reachable = set(reachable)
        self.tried: list[str] = []

    def reach(self, path: str) -> bool:
        self.tried.append(path)
        return path in self.reachable


def rank(number: int, *names: str) -> Endpoint:
    """Return the endpoint of a rank with transports ``names``: addresses are /0 and tcp0 for rank 0."""
    ways = {name: f"/{number}" if name == "shm" else f"{name}{number}" for name in names}
    return Endpoint.of(ways, 70 + number)


def bound(*endpoints: Endpoint) -> r.Bound:
    dims = r.GroupDims(ranks=len(endpoints), kinds=())
    return r.Bound(key=TransferKey(1, 0, 1), start=0, dims=dims, blocks=(), endpoints=endpoints)


def chosen(wanted: Sequence[str], offered: Sequence[Sequence[str]], *reachable: str) -> list[tuple[str, str]]:
    """Return (transport, address) of each rank."""
    ends = [rank(number, *names) for number, names in enumerate(offered)]
    made = Pairing(wanted, Files(*reachable).reach).choose(PEER, bound(*ends), 0.0)
    assert all(len(one.ways) == 1 for one in made.endpoints)
    assert [one.incarnation for one in made.endpoints] == [70 + number for number in range(len(ends))]
    return [(one.transport, one.address) for one in made.endpoints]


BOTH = ("shm", "tcp")


@pytest.mark.parametrize(
    ("wanted", "offered", "reachable", "expected"),
    [
        (BOTH, [BOTH], ["/0"], [("shm", "/0")]),
        (BOTH, [BOTH], [], [("tcp", "tcp0")]),
        (BOTH, [BOTH, BOTH], ["/0", "/1"], [("shm", "/0"), ("shm", "/1")]),
        (BOTH, [BOTH, BOTH], ["/0"], [("tcp", "tcp0"), ("tcp", "tcp1")]),
        (BOTH, [BOTH, ("tcp",)], ["/0", "/1"], [("tcp", "tcp0"), ("tcp", "tcp1")]),
        (("shm",), [BOTH], ["/0"], [("shm", "/0")]),
        (("tcp",), [BOTH], ["/0"], [("tcp", "tcp0")]),
        (BOTH, [("tcp",)], [], [("tcp", "tcp0")]),
        (BOTH, [("shm",)], ["/0"], [("shm", "/0")]),
        (("tcp", "shm"), [BOTH], ["/0"], [("tcp", "tcp0")]),
        (("shm", "nixl", "tcp"), [("shm", "nixl", "tcp")], [], [("nixl", "nixl0")]),
        (("shm", "nixl", "tcp"), [("shm", "nixl", "tcp")], ["/0"], [("shm", "/0")]),
        (("shm", "nixl", "tcp"), [BOTH], [], [("tcp", "tcp0")]),
        (("mooncake",), [("mooncake",)], [], [("mooncake", "mooncake0")]),
    ],
)
def test_the_first_transport_that_both_have_and_that_works(
    wanted: Sequence[str],
    offered: Sequence[Sequence[str]],
    reachable: Sequence[str],
    expected: list[tuple[str, str]],
) -> None:
    assert chosen(wanted, offered, *reachable) == expected


@pytest.mark.parametrize(
    ("wanted", "offered", "why"),
    [
        (("shm",), [BOTH], "share no memory"),
        (BOTH, [("shm",)], "share no memory"),
        (("tcp",), [("shm",)], "tcp here, shm at the receiver"),
        (("shm", "nixl"), [("tcp",)], "shm, nixl here, tcp at the receiver"),
        (BOTH, [("tcp",), ("shm",)], "no transport in common"),
    ],
)
def test_a_pair_without_a_way_is_an_error_with_the_reason(
    wanted: Sequence[str], offered: Sequence[Sequence[str]], why: str
) -> None:
    with pytest.raises(NoCommonTransport, match=why) as raised:
        chosen(wanted, offered)
    assert raised.value.info().code == "no_transport"


def test_a_peer_is_tried_once_until_its_ranks_start_again() -> None:
    files = Files("/0", "/9")
    pairing = Pairing(BOTH, files.reach)
    for now in (0.0, 1.0, 1e6):
        assert pairing.choose(PEER, bound(rank(0, *BOTH)), now).endpoints[0].transport == "shm"
    assert files.tried == ["/0"]
    pairing.choose(PEER, bound(rank(9, *BOTH)), 2.0)
    assert files.tried == ["/0", "/9"]


def test_an_unreachable_peer_is_tried_again_later() -> None:
    files = Files()
    pairing = Pairing(BOTH, files.reach)
    ends = bound(rank(0, *BOTH))
    assert pairing.choose(PEER, ends, 0.0).endpoints[0].transport == "tcp"
    files.reachable.add("/0")
    assert pairing.choose(PEER, ends, AGAIN_S - 1).endpoints[0].transport == "tcp"
    assert files.tried == ["/0"]
    assert pairing.choose(PEER, ends, AGAIN_S + 1).endpoints[0].transport == "shm"


def test_a_transport_that_broke_is_the_last_choice_for_a_while() -> None:
    pairing = Pairing(("shm", "nixl", "tcp"), Files("/0").reach)
    ends = bound(rank(0, "shm", "nixl", "tcp"))

    def choice(now: float, peer: Peer = PEER) -> str:
        return pairing.choose(peer, ends, now).endpoints[0].transport

    assert choice(0.0) == "shm"
    pairing.failed(PEER, "shm", BROKEN, 0.0)
    assert (choice(1.0), choice(1.0, OTHER)) == ("nixl", "shm")
    pairing.failed(PEER, "nixl", BROKEN, 2.0)
    assert choice(3.0) == "tcp"
    pairing.failed(PEER, "tcp", BROKEN, 4.0)
    assert choice(5.0) == "shm", "all have failed: the sender's order counts"
    assert choice(AGAIN_S + 1.0) == "shm"


def test_a_socket_that_is_gone_is_tried_once_a_pause_and_costs_no_further_transfer() -> None:
    files = Files("/0")
    pairing = Pairing(BOTH, files.reach)
    ends = bound(rank(0, *BOTH))
    assert pairing.choose(PEER, ends, 0.0).endpoints[0].transport == "shm"
    files.reachable.clear()
    pairing.failed(PEER, "shm", BROKEN, 1.0)
    for now in (2.0, AGAIN_S + 2, AGAIN_S + 3):
        assert pairing.choose(PEER, ends, now).endpoints[0].transport == "tcp"
    assert files.tried == ["/0", "/0"]


def test_shared_memory_alone_is_not_refused_before_the_next_try() -> None:
    files = Files("/0")
    pairing = Pairing(("shm",), files.reach)
    ends = bound(rank(0, *BOTH))
    for now in (0.0, 30.0):
        assert pairing.choose(PEER, ends, now).endpoints[0].transport == "shm"
        pairing.failed(PEER, "shm", BROKEN, now)
    files.reachable.clear()
    with pytest.raises(NoCommonTransport):
        pairing.choose(PEER, ends, AGAIN_S)


@pytest.mark.parametrize("error", [None, EngineDead("a digest was wrong").info(), DROPPED])
def test_other_failures_say_nothing_about_the_transport(error: ErrorInfo | None) -> None:
    pairing = Pairing(BOTH, Files("/0").reach)
    pairing.failed(PEER, "shm", error, 0.0)
    assert pairing.choose(PEER, bound(rank(0, *BOTH)), 1.0).endpoints[0].transport == "shm"


def test_facts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "MOST_PEERS", 3)
    files = Files()
    one = Pairing(BOTH, files.reach)
    for number in range(5):
        one.choose(Peer("p", number), bound(rank(number, *BOTH)), 0.0)
        one.failed(Peer("p", number), "tcp", BROKEN, 0.0)
    assert len(one._reached) == len(one._failed) == 3
    one.choose(Peer("p", 0), bound(rank(0, *BOTH)), 0.0)
    assert files.tried[-1] == "/0"
