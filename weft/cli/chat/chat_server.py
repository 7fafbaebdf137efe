"""A server that ``weft chat`` starts and ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

from weft.common import env
from weft.common.errors import ConfigError

STOP_S = 15.0
_READY = re.compile(r"weft is ready: (\S+) model=(\S+)")
_PROGRAM = (
    "import sys; from weft.cli.processes import child; child.die_with_parent(int(sys.argv.pop(1))); "
    "from weft.cli.main import main; main()"
)


class OwnServer:
    """Context manager for ``weft serve MODEL`` as a child process. The server never outlives this process."""

    def __init__(self, model: str, flags: Sequence[str], api_key: str) -> None:
        """Start the server without a wait. The server logs to standard error. Call from the main thread."""
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid())]
        command += ["serve", model, "--port", "0", "--log-level", "warning", *flags]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=env.child_environment(WEFT_API_KEY=api_key or None),
            start_new_session=True,  # keeps Ctrl-C away from the server
        )

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the server: terminate, wait up to ``STOP_S``, then kill."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def url(self) -> str:
        """Wait until the server is ready and return its URL. Raise ConfigError if the server ends instead."""
        out = self._process.stdout
        assert out is not None
        for line in out:
            if found := _READY.match(line):
                # drain the pipe, or the server could block
                threading.Thread(target=out.read, daemon=True).start()
                return found[1]
        self._process.wait()
        raise ConfigError("the server did not start; its output is above")
