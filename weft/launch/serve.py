"""``weft serve``: a front in this process and heads in children, joined by sockets in a private folder."""

from __future__ import annotations

import shutil
import signal
import sys
from typing import Any

import click

from weft.common import log
from weft.common.folder import private_folder
from weft.config.hosts import uses_board
from weft.config.resolved import EngineConfig
from weft.config.sections import FrontSection
from weft.launch import child, options

_SECONDS_TO_CLOSE = 5.0
_STOPS = {signal.SIGTERM, signal.SIGINT}


@click.command(cls=options.Command)
@click.argument("model_name", metavar="[MODEL]", required=False)
@options.settings(options.ALL)
def serve(model_name: str | None, **given: Any) -> int:
    """Serve MODEL over an OpenAI-compatible API.

    MODEL is a folder, a hub name or a bundled model (see `weft models`); without it the default bundled model
    is served.
    """
    from weft.config.resolve import resolve

    config = options.build(given, model_name)
    host = config.parallel.node_rank
    log.configure(config.front.log_level, f"host {host}" if host else "front")
    return run(resolve(config), config.front)


def run(resolved: EngineConfig, front: FrontSection) -> int:
    """Serves until told to stop, or until nothing can be served any more; returns the exit status.

    A host other than the first of several runs its share of heads and ranks for the front on the first one.
    """
    if resolved.parallel.node_rank:
        from weft.launch.host import serve_host
        from weft.launch.node import serve_node

        child.forbid_core_dumps()
        keep = serve_host if uses_board(resolved.parallel) else serve_node
        return keep(resolved, front.log_level)
    from weft.front.server import serve as run_front
    from weft.launch.heads import HeadProcesses

    child.forbid_core_dumps()
    # Until the front takes the signal over, SIGTERM ends this process in order: no folder is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    folder = private_folder()
    heads: HeadProcesses | None = None
    patience, status = 0.0, 1
    ends: list[int] = []
    try:
        heads = HeadProcesses(resolved, folder, front.log_level, front.engine_restarts)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        places = [heads.start(replica) for replica in range(resolved.parallel.data_parallel_size)]
        status = run_front(resolved, front, places, heads.respawn)
        patience = _SECONDS_TO_CLOSE
    finally:
        if heads is not None:
            ends = heads.close(patience, status)
        shutil.rmtree(folder, ignore_errors=True)
    return 2 if status != 0 and 2 in ends else status
