"""A test process that starts as a copy behaves like a new process (``tests.support.forked``)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import signals_are_heeded
from tests.support import forked
from tests.support.slowness import deadline
from weft.common import signals

PROBE = "tests.support.probe"
pytestmark = pytest.mark.skipif(subprocess.Popen is not forked.Popen, reason="no copies are made")


def ended(*words: str, **given: Any) -> tuple[int, str, str]:
    """Run a probe. Return its status, output and errors."""
    command = [sys.executable, "-m", PROBE, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given
    ) as process:
        said, errors = process.communicate("asked", timeout=deadline(60))
    return process.returncode, said, errors


def both(*words: str, **given: Any) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
    """A copy's end, and a real process's."""
    copy = ended(*words, **given)
    with forked.real():
        return copy, ended(*words, **given)


@pytest.mark.parametrize("session", [False, True])
def test_a_copy_has_what_a_real_process_has(tmp_path: Path, session: bool) -> None:
    read, write = os.pipe()
    variables = {**os.environ, "SOME": "thing", "PYTHONPATH": str(forked.ROOT)}
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    try:
        with signals.blocked():
            copy, real = both(
                "7", "b c", env=variables, cwd=tmp_path, pass_fds=(write,), start_new_session=session
            )
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)
    assert copy[0] == real[0] == 7
    assert copy[2] == real[2] == ""
    found, expected = json.loads(copy[1]), json.loads(real[1])
    assert found == expected
    assert found["parent"] == os.getpid()
    assert found["input"] == "asked"
    assert found["leads"] is session
    assert int(signal.SIGUSR1) in found["ignored"]
    assert {int(n) for n in signals.STOPS} <= set(found["blocked"])


@pytest.mark.parametrize(
    ("words", "status"), [(["0"], 0), ([f"-{int(signal.SIGTERM)}"], -15), (["-2"], -2), (["x"], 1), ([], 1)]
)
def test_a_copy_ends_as_a_real_process(words: Sequence[str], status: int) -> None:
    with signals_are_heeded():
        copy, real = both(*words)
    assert copy[0] == real[0] == status
    assert copy[2].splitlines()[-1:] == real[2].splitlines()[-1:]


def test_a_copy_of_the_command_line() -> None:
    def made(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "weft", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60))
        return done.returncode, done.stdout, done.stderr

    for words in (["--version"], ["serve", "--no-such-flag"], ["models"]):
        copy = made(*words)
        with forked.real():
            assert copy == made(*words)


@pytest.mark.parametrize(
    "variables", [{"PYTHONPATH": "/elsewhere"}, {"WEFT_DISABLE_CPU_OPS": "1"}, {"OMP_NUM_THREADS": "2"}]
)
def test_variables_read_at_import_need_a_real_process(variables: dict[str, str]) -> None:
    own = {**os.environ, **variables}
    assert forked._ask(["-m", PROBE], own, None, False, [0, 1, 2], [0, 1, 2]) is None
