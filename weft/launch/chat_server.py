"""A server that ``weft chat`` starts for itself, and ends."""

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
    "import sys; from weft.launch import child; child.die_with_parent(int(sys.argv.pop(1))); "
    "from weft.launch.main import main; main()"
)


class OwnServer:
    """``weft serve MODEL`` beside this process, which it does not outlive. A context manager."""

    def __init__(self, model: str, flags: Sequence[str], api_key: str) -> None:
        """Starts it; does not wait. Its log goes to standard error. From the main thread."""
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid())]
        command += ["serve", model, "--port", "0", "--log-level", "warning", *flags]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=env.child_environment(WEFT_API_KEY=api_key or None),
            start_new_session=True,  # Ctrl-C of this terminal is not for it
        )

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def url(self) -> str:
        """Waits until it can answer; where it listens. Raises ConfigError where it ends instead."""
        out = self._process.stdout
        assert out is not None
        for line in out:
            if found := _READY.match(line):
                threading.Thread(target=out.read, daemon=True).start()  # whatever else it writes
                return found[1]
        self._process.wait()
        raise ConfigError("the server did not start; what it said is above")
