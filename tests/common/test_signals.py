"""Stop signals, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.slowness import deadline
from weft.common import signals


@pytest.mark.parametrize("number", signals.STOPS)
def test_a_child_that_starts_blocked_is_not_ended_before_it_ignores(number: int) -> None:
    code = (
        "import sys\nprint('up', flush=True)\nsys.stdin.readline()\n"
        "from weft.common import signals\nsignals.ignore()\nprint('alive', flush=True)\nsys.stdin.readline()"
    )
    with signals.blocked():
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(number)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "alive\n"
        child.send_signal(number)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(deadline(30)) == 0


def test_blocking_ends_with_the_block() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals.blocked():
        assert set(signals.STOPS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_what_nohup_ignores_is_left_alone() -> None:
    code = "from weft.common import signals; print(*(number.name for number in signals.handled_stops()))"

    def start(ignored: tuple[int, ...]) -> str:
        def prepare() -> None:
            for number in signals.STOPS:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=prepare
        )
        return made.stdout.strip()

    assert start(()) == "SIGTERM SIGINT SIGHUP SIGQUIT"
    assert start((signal.SIGHUP,)) == "SIGTERM SIGINT SIGQUIT"
    assert start((signal.SIGINT, signal.SIGQUIT)) == "SIGTERM SIGINT SIGHUP"
