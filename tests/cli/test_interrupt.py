"""Ctrl-C in computing commands gives status 130 and one line without a traceback. Progress bars need a
terminal.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slowness import deadline


class Watched:
    """A command in a terminal of its own, which is its standard output and error."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))  # a bar adapts to the width of the terminal
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        self._terminal = ours
        self.shown = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._terminal, 4096)
            except OSError:  # no process has the terminal open any more
                return
            self.shown += data.decode(errors="replace")

    def until(self, text: str) -> None:
        """Waits until ``text`` was shown."""
        end = time.monotonic() + deadline(120)
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            time.sleep(0.02)

    def close(self) -> None:
        """End the command. Must be called only once."""
        self.process.kill()
        self.process.wait()
        self._reader.join(deadline(20))
        os.close(self._terminal)


@pytest.fixture
def watch() -> Iterator[Any]:
    commands: list[Watched] = []

    def start(*arguments: str) -> Watched:
        commands.append(Watched(*arguments))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(["eval", "gsm-mini", "--tensor-parallel-size", "2"], "1/500", marks=pytest.mark.slow),
        pytest.param(
            ["verify", "--self", "--prompts", "2", "--tokens", "200"], "deterministic", marks=pytest.mark.grid
        ),
        (
            [
                "generate",
                *["Count"] * 8,
                "--ignore-eos",
                "--max-tokens",
                "2000",
                "--no-chat",
                "--dtype",
                "float64",
            ],
            "Loading weights: 100%",
        ),
        pytest.param(["eval", "gsm-mini", "--limit", "500"], "1/500", marks=pytest.mark.grid),
        pytest.param(["bench", "offline", "--rounds", "50"], "Loading weights: 100%", marks=pytest.mark.grid),
    ],
    ids=["eval, two ranks", "verify", "generate", "eval", "bench"],
)
def test_an_interrupt_gives_130_and_no_traceback(watch: Any, arguments: list[str], shown: str) -> None:
    command = watch(*arguments)
    command.until(shown)
    time.sleep(0.3)  # into the computation
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(deadline(60)) == 130, command.shown
    assert "Traceback" not in command.shown
    assert "weft: interrupted" in command.shown


@pytest.mark.slow
def test_bars_are_for_terminals(checkpoint: str, watch: Any) -> None:
    arguments = ["eval", "gsm-mini", checkpoint, "--limit", "2", "--max-tokens", "2"]
    command = watch(*arguments)
    assert command.process.wait(deadline(120)) == 0, command.shown
    command.until("gsm-mini: ")
    assert "Loading weights: 100%" in command.shown
    assert "Prompts" in command.shown
    made = subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        timeout=deadline(120),
        check=True,
    )
    assert "Loading weights" not in made.stderr
    assert "Prompts" not in made.stderr
    assert "\r" not in made.stderr


def test_bars_are_made_in_one_place() -> None:
    root = Path(__file__).resolve().parents[2]
    users = [
        str(path.relative_to(root)) for path in (root / "weft").rglob("*.py") if "tqdm(" in path.read_text()
    ]
    assert users == ["weft/common/progress.py"]
