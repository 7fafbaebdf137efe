"""``weft serve``: a front in this process and a head in a child, joined by a socket in a private folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from weft.common import env, log
from weft.config.resolved import EngineConfig
from weft.launch import child, options

#: A Unix socket's path has at most 107 bytes; the folder must leave room for the name below.
_LONGEST_FOLDER = 90
_SECONDS_TO_CLOSE = 5.0


@click.command()
@click.argument("model_name", metavar="[MODEL]", required=False)
@options.settings(options.ALL)
def serve(model_name: str | None, **given: Any) -> int:
    """Serve MODEL over an OpenAI-compatible API.

    MODEL is a folder, a hub name or a bundled model (see `weft models`); without it the default bundled model
    is served.
    """
    from weft.config.resolve import resolve

    config = options.build(given, model_name)
    log.configure(config.front.log_level, "front")
    resolved = resolve(config)

    from weft.front.server import serve as run_front

    child.forbid_core_dumps()
    # Until the front takes the signal over, SIGTERM ends this process in order: no folder is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = private_folder()
    head: subprocess.Popen[bytes] | None = None
    patience = 0.0
    try:
        endpoint = f"ipc://{folder}/head"
        head = start_head(resolved, endpoint, config.front.log_level)
        status = run_front(resolved, config.front, endpoint, head)
        patience = _SECONDS_TO_CLOSE
    finally:
        head_status = close_head(head, patience) if head is not None else 0
        shutil.rmtree(folder, ignore_errors=True)
    return 2 if status != 0 and head_status == 2 else status


def private_folder() -> Path:
    """A new folder that only this user can enter, with a name short enough for a socket inside it."""
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="weft-", dir="/tmp"))
    return folder


def start_head(config: EngineConfig, endpoint: str, log_level: str) -> subprocess.Popen[bytes]:
    """Starts a head that will listen at ``endpoint`` and die with this process. Does not wait for it.

    Must be called from the main thread: the kernel ties the child to the thread that made it.
    """
    command = [sys.executable, "-m", "weft.launch.head_main", str(os.getpid()), endpoint, log_level]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, env=env.child_environment())
    assert head.stdin is not None
    try:
        with head.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(config))
    except BrokenPipeError:
        # It died before it read its configuration; whoever watches it sees that.
        pass
    return head


def close_head(head: subprocess.Popen[bytes], seconds: float) -> int:
    """Gives a head ``seconds`` to end (it was told to stop), then kills it. Returns its exit status."""
    try:
        return head.wait(seconds)
    except subprocess.TimeoutExpired:
        head.kill()
        return head.wait()
