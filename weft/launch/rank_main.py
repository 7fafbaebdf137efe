"""Entry point of a worker rank: ``python -m weft.launch.rank_main PARENT ADDRESS RANK LOG_LEVEL``.

Its EngineConfig comes on standard input, as msgpack. It says hello before it imports torch, so that a rank
that does not belong is refused at once. Ends with status 2 when it was refused, cannot load, or no head
comes.
"""

from __future__ import annotations

import os
import sys
import time

from weft import __version__
from weft.common import log
from weft.common.errors import WeftError
from weft.common.title import set_title
from weft.config.group_settings import shared_settings
from weft.config.names import instance_name, process_name
from weft.config.resolved import EngineConfig
from weft.launch import child
from weft.parallel.control import HeadLink, RankChannel, ZmqRank
from weft.parallel.secret import read_keys
from weft.types import frames as f

WELCOME_S = 120.0
"""Seconds that a rank waits for a head's welcome: for the first one's, and for that of each that follows."""
NO_HEAD = 4
"""Exit status of a rank that no head answered: nothing is wrong with it."""
AGAIN_S = 1.0
"""Seconds between two hellos: a head may die when it has heard one and not yet answered."""


class NoHead(f.FrameError):
    """No head answered in time."""


def run(arguments: list[str]) -> int:
    """Serves as a rank until the head ends it; returns the exit status."""
    parent, *rest = arguments
    child.begin(int(parent))
    return work(rest)


def work(arguments: list[str]) -> int:
    """``run`` in a process that has begun, without its first argument."""
    address, rank, level = arguments
    config = child.read_setup(EngineConfig)
    head = instance_name(config, config.replica)
    set_title(f"worker {rank} of head {head}", config.served_names[0])
    log.configure(level, process_name(config, int(rank)))
    try:
        serve(config, address, int(rank))
    except NoHead as error:
        print(f"weft: rank {rank}: {error.message}", file=sys.stderr, flush=True)
        return NO_HEAD
    except WeftError as error:
        print(f"weft: rank {rank}: {error.message}", file=sys.stderr, flush=True)
        return 2
    return 0


def serve(config: EngineConfig, address: str, rank: int) -> None:
    """Joins the group whose head listens at ``address``. Raises ConfigError, or EngineDead."""
    secret = config.parallel.group_secret if address.startswith("tcp://") else None
    keys = read_keys(secret) if secret is not None else None

    def join(epoch: int) -> HeadLink:
        channel = ZmqRank(address, rank, keys)  # what an earlier head sent, or was sent, is not in it
        try:
            welcome = say_hello(channel, config, rank, epoch)
        except BaseException:
            channel.close(deliver=False)
            raise
        heartbeats = ZmqRank(welcome.heartbeats, rank, keys) if welcome.heartbeats else None
        return HeadLink(channel, heartbeats, welcome.incarnation)

    link = join(-1)
    from weft.engine.rank import run_rank

    run_rank(config, rank, link, join)


def say_hello(channel: RankChannel, config: EngineConfig, rank: int, epoch: int = -1) -> f.RankWelcome:
    """The head's welcome. ``epoch``: the last one that this rank was in.

    Raises EngineDead when the head refuses, or none answers in time.
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
    while (left := until - time.monotonic()) > 0:
        if (data := channel.receive(0)) is None:
            channel.send(f.encode(hello))
            data = channel.receive(min(left, AGAIN_S))
        if data is None:
            continue
        answer = f.decode_to_rank(data)
        if isinstance(answer, f.RankWelcome):
            return answer
        if isinstance(answer, f.Refused):
            raise f.FrameError(f"refused by the head: {answer.error.message}")
    raise NoHead(f"the head did not answer within {WELCOME_S:g} s")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
