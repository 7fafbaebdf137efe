"""``weft build-ops``: compiles the CPU extension, once per machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from weft.common import signals
from weft.common.errors import ConfigError
from weft.ops.cpu import build


@click.command("build-ops")
@click.option("--force", is_flag=True, help="Compile again, even if the operations are built.")
@click.option("--verbose", is_flag=True, help="Print the compiler's command lines and warnings.")
@click.option(
    "--wheel",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Compile for every level of CPUs into FOLDER, for a wheel, and print the wheel's platform.",
)
def build_ops(force: bool, verbose: bool, wheel: Path | None) -> None:
    """Compile the C++ operations for this machine's CPU (once, minutes of CPU time; needs g++ or clang++).

    Without the C++ operations Weft uses torch's operations, which are slower on a CPU. Compiled files are
    kept: an interrupted build continues later. An installed wheel may already contain operations for this
    CPU; then only --force compiles.
    """
    terminal = _Terminal() if sys.stdout.isatty() else None
    try:
        # Compilers run in separate process groups, so a signal would not stop the compilers.
        with signals.ending():
            say = click.echo if terminal is None else terminal.say
            show = None if terminal is None else terminal.show
            if wheel is None:
                build.build(force=force, verbose=verbose, say=say, show=show)
            else:
                say(build.build_for_wheel(wheel, verbose=verbose, say=say, show=show))
    except build.BuildError as error:
        if error.output:
            click.echo(error.output, err=True)
        raise
    except BrokenPipeError:  # the output is closed; the folder is fine
        raise
    except OSError as error:
        why = (error.strerror or "unknown reason").lower()
        raise ConfigError(
            f"the C++ operations cannot be stored in their folder ({why}): set WEFT_OPS_CACHE to a "
            "folder with write permission"
        ) from error
    finally:
        if terminal is not None:
            terminal.clear()


class _Terminal:
    """Terminal output with a last line that is rewritten; other lines stay above."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, line: str) -> None:
        """Replace the last line, cut to the width of the terminal."""
        line = line[: shutil.get_terminal_size().columns - 1]
        if line != self._shown:
            self._write(line)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self.clear()
        click.echo(line)

    def clear(self) -> None:
        """Erase the last line."""
        if self._shown:
            self._write("")

    def _write(self, line: str) -> None:
        click.echo(f"\r{line}\x1b[K", nl=False, color=True)
        self._shown = line
