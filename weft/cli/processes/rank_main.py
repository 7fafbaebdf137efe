"""Entry point of a worker rank: ``python -m weft.cli.processes.rank_main PARENT ADDRESS RANK LOG_LEVEL``.

The EngineConfig arrives on standard input, as msgpack. The rank says hello before the import of torch, so
that a wrong rank is refused at once. The status is 2 if the rank was refused or cannot load, and
``NO_ENGINE`` if no engine answers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from weft import __version__
from weft.cli.processes import child
from weft.common import log
from weft.common.errors import WeftError
from weft.common.title import set_title
from weft.config.group_settings import shared_settings
from weft.config.names import instance_name, process_name
from weft.config.resolved import EngineConfig
from weft.control.directory.joined_host import NO_ENGINE
from weft.parallel.control import EngineLink, RankChannel, ZmqRank
from weft.parallel.rendezvous import RendezvousClient
from weft.parallel.secret import CurveKeys, read_keys
from weft.types import frames as f
from weft.types.rendezvous import control_key

WELCOME_S = 120.0
"""Seconds to wait for the welcome of an engine, at the start and after each loss of an engine."""
AGAIN_S = 1.0
"""Seconds between two hellos. An engine may die after a hello and before its answer."""


class NoEngine(f.FrameError):
    """No engine answered in time."""


def run(arguments: list[str]) -> int:
    """Serve as a rank until the engine ends the rank. Return the exit status."""
    parent, *rest = arguments
    child.begin(int(parent))
    return work(rest)


def work(arguments: list[str]) -> int:
    """Run the rank of a prepared process until its end.

    ``arguments``: those of ``run`` without PARENT. Return the exit status: 0, NO_ENGINE if no engine answers,
    2 for another error. Errors are printed.
    """
    address, rank, level = arguments
    config = child.read_setup(EngineConfig)
    engine = instance_name(config, config.replica)
    set_title(f"worker {rank} of head {engine}", config.served_names[0])
    log.configure(level, process_name(config, int(rank)))
    try:
        serve(config, address, int(rank))
    except NoEngine as error:
        print(f"weft: rank {rank}: {error.message}", file=sys.stderr, flush=True)
        return NO_ENGINE
    except WeftError as error:
        print(f"weft: rank {rank}: {error.message}", file=sys.stderr, flush=True)
        return 2
    return 0


def serve(config: EngineConfig, address: str, rank: int) -> None:
    """Join the group of the engine at ``address`` and run as a rank. Raise ConfigError or EngineDead.

    ``address``: "" for the engine of another host, whose address is in the rendezvous store.
    """
    secret = None if address.startswith("ipc://") else config.parallel.group_secret
    keys = read_keys(secret) if secret is not None else None

    def join(epoch: int) -> EngineLink:
        if address:
            return _link(config, address, rank, keys, epoch)
        return _follow(config, rank, keys, epoch)

    link = join(-1)
    from weft.engine.rank import run_rank

    run_rank(config, rank, link, join)


def _follow(config: EngineConfig, rank: int, keys: CurveKeys | None, epoch: int) -> EngineLink:
    """Return the link to the engine of another host, at the address in the rendezvous store.

    The next engine has another address, so the address is read again while the rank waits for the welcome.
    """
    assert keys is not None, "a group over several hosts has a secret"
    key, until = control_key(config.replica), time.monotonic() + WELCOME_S
    client = RendezvousClient(config.rendezvous, keys)
    try:
        while (found := client.wait(key, max(until - time.monotonic(), 0.0))) is not None:
            place = found

            def stays(place: bytes = place) -> bool:
                return client.entries.get(key, place) == place and time.monotonic() < until

            try:
                return _link(config, place.decode(), rank, keys, epoch, stays)
            except NoEngine:
                if time.monotonic() >= until:
                    raise
        raise NoEngine(f"no engine published an address within {WELCOME_S:g} s")
    finally:
        client.close()


def _link(
    config: EngineConfig,
    address: str,
    rank: int,
    keys: CurveKeys | None,
    epoch: int,
    stays: Callable[[], bool] = lambda: True,
) -> EngineLink:
    """Return the link to the engine at ``address``. Raise the errors of ``say_hello``."""
    channel = ZmqRank(address, rank, keys)  # a new channel has no messages of an earlier engine
    try:
        welcome = say_hello(channel, config, rank, epoch, stays)
    except BaseException:
        channel.close(deliver=False)
        raise
    heartbeats = ZmqRank(welcome.heartbeats, rank, keys) if welcome.heartbeats else None
    return EngineLink(channel, heartbeats, welcome.incarnation, welcome.updates)


def say_hello(
    channel: RankChannel,
    config: EngineConfig,
    rank: int,
    epoch: int = -1,
    stays: Callable[[], bool] = lambda: True,
) -> f.RankWelcome:
    """Return the engine's welcome; blocks for at most ``WELCOME_S``, and only while ``stays()``.

    ``epoch``: the rank's last epoch, -1 for none. Raise FrameError if the engine refuses, NoEngine if no
    engine answers in time; both are EngineDead.
    """
    hello = f.RankHello(
        version=f.VERSION,
        release=__version__,
        rank=rank,
        pid=os.getpid(),
        epoch=epoch,
        settings=shared_settings(config),
    )
    until = time.monotonic() + WELCOME_S
    while stays() and (left := until - time.monotonic()) > 0:
        # An answer may already wait from the last round: do not send another hello then.
        if (data := channel.receive(0)) is None:
            channel.send(f.encode(hello))
            data = channel.receive(min(left, AGAIN_S))
        if data is None:
            continue
        answer = f.decode_to_rank(data)
        if isinstance(answer, f.RankWelcome):
            return answer
        if isinstance(answer, f.RankRefused):
            raise f.FrameError(f"the engine refused this rank: {answer.error.message}")
    raise NoEngine(f"the engine did not answer within {WELCOME_S:g} s")


if __name__ == "__main__":
    child.end_after(run)
