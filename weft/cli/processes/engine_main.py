"""Entry point of an engine process: ``python -m weft.cli.processes.engine_main PARENT ENDPOINT LOG_LEVEL
[PIPE]``.

PIPE is the descriptor of a pipe to the rank supervisor. Without PIPE the engine starts its own workers. The
EngineConfig arrives on standard input, as msgpack. The status is 2 after a configuration error, and 1 after
any other failure.
"""

from __future__ import annotations

import sys

from weft.cli.processes import child
from weft.common import log, progress
from weft.common.errors import ConfigError, WeftError
from weft.common.title import set_title
from weft.config.names import instance_name, process_name
from weft.config.resolved import EngineConfig
from weft.engine.server.listener import listen


def run(arguments: list[str]) -> int:
    """Run an engine until its API server closes the engine. Return the exit status."""
    parent, *rest = arguments
    child.begin(int(parent))
    return work(rest)


def work(arguments: list[str]) -> int:
    """Run the engine of a prepared process until its end.

    ``arguments``: those of ``run`` without PARENT. Return the exit status: 0, 2 for a ConfigError, 1 for
    another error, which is printed.
    """
    endpoint, level, *pipe = arguments
    config = child.read_setup(EngineConfig)
    set_title(f"head {instance_name(config, config.replica)}", config.served_names[0])
    log.configure(level, process_name(config))
    if config.group or config.parallel.data_parallel_size > 1 or not sys.stderr.isatty():
        progress.use_lines()
    try:
        listener = listen(config, endpoint)
        if config.scripted:
            from weft.engine.scripted.scripted import run_scripted

            run_scripted(config, listener)
        else:
            with child.importing():  # torch
                from weft.engine.server.engine_server import run_engine

            run_engine(config, listener, int(pipe[0]) if pipe else None)
    except WeftError as error:
        print(f"weft: {error.message}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    child.end_after(run)
