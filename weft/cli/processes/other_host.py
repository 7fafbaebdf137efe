"""A host other than the first: runs its share of a server's groups, each group in a separate process.

Entry point of one group: ``python -m weft.cli.processes.other_host PARENT LOG_LEVEL``. The EngineConfig
arrives on standard input, as msgpack. The status is 2 after a configuration error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from weft.cli.processes import child
from weft.cli.processes.node import until_stopped
from weft.common import env, log, signals
from weft.common.errors import ConfigError, WeftError
from weft.common.title import set_title
from weft.config.hosts import has_ranks, uses_board
from weft.config.resolved import EngineConfig

logger = log.get_logger(__name__)

_LOOK = 0.2
_END_S = 10.0
"""Seconds for groups to end after a signal."""


def serve_group(config: EngineConfig, log_level: str) -> int:
    """Run the group's share of this host until the server ends, or a signal comes.

    Return the exit status. Raise ConfigError.
    """
    from weft.cli.processes.host import serve_host
    from weft.cli.processes.node import serve_node

    keep = serve_host if uses_board(config.parallel) else serve_node
    return keep(config, log_level)


def serve_groups(groups: Sequence[EngineConfig], log_level: str) -> int:
    """Run this host's share of ``groups`` until the server ends, or a signal comes (0).

    Return the worst status of a group; the end of a group does not end the others. Raise ConfigError.
    """
    mine = [group for group in groups if has_ranks(group.parallel)]
    node = groups[0].parallel.node_rank
    if not mine:
        raise ConfigError(f"--node-rank {node}: no group has ranks on this host", param="--node-rank")
    if len(mine) == 1:
        return serve_group(mine[0], log_level)
    set_title(f"host {node}", groups[0].served_names[0])
    running: dict[str, subprocess.Popen[bytes]] = {}
    statuses: list[int] = []

    def keep() -> int:
        for group in mine:
            running[group.group] = _start(group, log_level)
        while running:
            time.sleep(_LOOK)
            for name, process in list(running.items()):
                if (status := process.poll()) is not None:
                    del running[name]
                    # A negative status means that a signal killed the process.
                    statuses.append(status if status >= 0 else 1)
                    if status:
                        logger.error("group %s ended with status %d", name, status)
        return max(statuses)

    try:
        return until_stopped(keep)
    finally:
        _end(list(running.values()))


def _start(config: EngineConfig, log_level: str) -> subprocess.Popen[bytes]:
    """Start the process of a group and send the configuration.

    Call from the main thread: the kernel ends the child when the calling thread ends.
    """
    command = [sys.executable, "-m", "weft.cli.processes.other_host", str(os.getpid()), log_level]
    with signals.blocked():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env.child_environment())
    assert process.stdin is not None
    try:
        with process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(config))
    except BrokenPipeError:  # the child died early; the exit status reports the error
        pass
    return process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes, and kill the rest after ``_END_S`` seconds. Waits for all."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(arguments: list[str]) -> int:
    """Run one group's share and return the exit status; 2 for a ConfigError, 1 for another error, which is
    printed.

    ``arguments``: process id of the parent, log level.
    """
    parent, level = arguments
    child.die_with_parent(int(parent))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)  # the parent forwards stop signals
    child.forbid_core_dumps()
    config = child.read_setup(EngineConfig)
    set_title(f"host {config.parallel.node_rank} of {config.group}", config.served_names[0])
    log.configure(level, f"host {config.parallel.node_rank} {config.group}")
    try:
        return serve_group(config, level)
    except WeftError as error:
        print(f"weft: group {config.group}: {error.message}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
