"""Parallel compilers and their progress. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.common.errors import WeftError

_LAST_LINES = 30
_LOOK_S = 0.1

Say = Callable[[str], None]


class BuildError(WeftError):
    """The C++ operations cannot be built here. ``output``: the compiler's last lines, if any."""

    code = "build_failed"

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True)
class CompilerReport:
    """Receivers of progress."""

    say: Say
    """Receives permanent lines."""
    show: Say | None = None
    """Receives a line that replaces the previous line. None: one permanent line per file."""


class _Compiler:
    """A running compiler. The object appears under its name when complete."""

    def __init__(self, command: Sequence[str], source: Path, made: Path) -> None:
        """Start a compiler for ``source``.

        ``made``: path of the complete object. Raises OSError if the compiler does not start.
        """
        self.source = source
        self.command: list[str] = []
        self.began = time.monotonic()
        self._made, self._undo = made, contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(dir=made.parent, prefix="partial-")
            self._partial = Path(stack.enter_context(folder)) / made.name
            self._output = stack.enter_context(tempfile.TemporaryFile())
            # A process group: the started process is a driver, and its child compiles.
            self.command = [*command, "-c", str(source), "-o", str(self._partial)]
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            self._undo = stack.pop_all()

    def finish(self) -> str:
        """Move the object of an ended compiler to its name and return the compiler's output.

        Raises BuildError if the compiler failed.
        """
        with self._undo:
            self._output.seek(0)
            output = self._output.read().decode(errors="replace").strip()
            if self.process.returncode != 0:
                raise BuildError(f"{self.source.name} does not compile", _last(output))
            self._partial.replace(self._made)
        return output

    def stop(self) -> None:
        """Kill the compiler and its children."""
        with self._undo:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def compile_files(
    command: Sequence[str],
    files: Sequence[tuple[Path, Path]],
    processes: int,
    verbose: bool,
    report: CompilerReport,
) -> None:
    """Compile each (source, object) of ``files``, in order, with ``processes`` compilers at a time.

    Raises BuildError at the first failure. Any exception stops the other compilers.
    """
    say = report.say
    began = time.monotonic()
    waiting = deque(files)
    running = list[_Compiler]()
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                source, made = waiting.popleft()
                running.append(_Compiler(command, source, made))
                if verbose:
                    say(" ".join(running[-1].command))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                output = one.finish()
                if verbose and output:
                    say(output)
                done += 1
                if report.show is None:
                    own = time.monotonic() - one.began
                    say(f"  {done}/{len(files)} {one.source.name} ({own:.0f} s)")
            if report.show is not None:
                names = ", ".join(one.source.name for one in running)
                report.show(f"  {done} of {len(files)} compiled, {time.monotonic() - began:.0f} s: {names}")
            if running:
                time.sleep(_LOOK_S)
    # An exception, Ctrl-C included, must not leave compilers behind.
    finally:
        for one in running:
            one.stop()


@contextlib.contextmanager
def precompiled(
    command: Sequence[str], headers: Path | None, folder: Path, say: Say = lambda line: None
) -> Iterator[Sequence[str]]:
    """Yield flags of GCC that include ``headers``, compiled once in ``folder``. ``say`` gets the command.

    Yields no flags without headers, and if the headers do not compile alone: each source includes what the
    source uses. Any exception stops the compiler.
    """
    if headers is None or not headers.exists():
        yield ()
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as made:
        # GCC takes first.h.gch for first.h, or reads first.h if GCC cannot use first.h.gch.
        first = Path(made) / "first.h"
        first.write_text(f'#include "{headers}"\n')
        compiler = _Compiler([*command, "-x", "c++-header"], first, first.with_name("first.h.gch"))
        try:
            say(" ".join(compiler.command))
            compiler.process.wait()
        except BaseException:
            compiler.stop()
            raise
        flags: Sequence[str] = ("-include", str(first))
        try:
            compiler.finish()
        except BuildError:
            flags = ()
        yield flags


def run(command: Sequence[str], failure: str, verbose: bool, say: Say) -> None:
    """Run one command to its end.

    Raises BuildError with the message ``failure``. With ``verbose``, ``say`` gets the command and its output.
    """
    if verbose:
        say(" ".join(command))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    output = (ran.stdout + ran.stderr).strip()
    if ran.returncode != 0:
        raise BuildError(failure, _last(output))
    if verbose and output:
        say(output)


def _last(output: str) -> str:
    return "\n".join(output.splitlines()[-_LAST_LINES:])


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Yield a path beside ``target``. A clean exit renames the file to ``target``; an error removes it."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as folder:
        partial = Path(folder) / target.name
        yield partial
        partial.replace(target)
