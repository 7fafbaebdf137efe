"""``weft``: the command line. Each command is imported on use, and imports torch only when needed."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import NoReturn

import click

from weft import __version__
from weft.common import env
from weft.common.errors import EngineDead, WeftError
from weft.config.flags import suggest

#: Command name -> module and function.
_COMMANDS = {
    "serve": "weft.cli.serve.serve:serve",
    "up": "weft.cli.serve.up:up",
    "engine": "weft.cli.serve.engine:engine",
    "front": "weft.cli.serve.front:front",
    "chat": "weft.cli.chat.chat_command:chat",
    "generate": "weft.cli.generate:generate",
    "batch": "weft.cli.batch:batch",
    "eval": "weft.cli.evaluate.evaluate:evaluate",
    "train": "weft.cli.train:train",
    "verify": "weft.cli.verify.verify:verify",
    "models": "weft.cli.models:models",
    "run": "weft.cli.local_models:run",
    "pull": "weft.cli.local_models:pull",
    "list": "weft.cli.local_models:list_models",
    "ps": "weft.cli.local_models:ps",
    "sim": "weft.cli.sim.sim:sim",
    "plan": "weft.cli.plan.plan:plan",
    "bench": "weft.cli.bench.bench:bench",
    "status": "weft.cli.admin:status",
    "scale": "weft.cli.admin:scale",
    "drain": "weft.cli.admin:drain",
    "restart": "weft.cli.admin:restart",
    "revive": "weft.cli.admin:revive",
    "trace": "weft.cli.trace:trace",
    "build-ops": "weft.cli.build_ops:build_ops",
}

#: Exception of newer click versions for a group without a command. The message is the help text.
_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _Weft(click.Group):
    """Group that imports commands on use, and suggests similar names for unknown commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"no such command {name!r}.{suggest(name, _COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Weft, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="weft")
def cli() -> None:
    """Serve and run large language models."""


_OF_FILE = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        errno.ENAMETOOLONG,
    )
)
"""Errors that the user can mend if the error names the file, for example: no permission, no such file."""
_OF_MACHINE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE))
"""Errors that the user can mend: a full disk, too many open files."""


def open_closed_streams() -> None:
    """Open the null device in place of closed standard streams, for example after ``weft serve >&-``.

    Otherwise the next file or socket gets the number of the closed stream, and child processes write to it.
    Characters that the encoding of a stream does not have are printed as ``?``.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command line (by default that of this process) and end the process.

    The status is the command's status, 1 after a failure of the engine, 2 after a usage or configuration
    error, or 130 after Ctrl-C. Each error is printed as one line on standard error.
    """
    open_closed_streams()
    env.spin_briefly()
    try:
        status = cli.main(arguments, prog_name="weft", standalone_mode=False)
    except WeftError as error:
        click.echo(f"weft: {error.message}", err=True)
        status = 1 if isinstance(error, EngineDead) else 2
    except click.ClickException as error:
        sign = "" if isinstance(error, _HELP) else "weft: "
        click.echo(f"{sign}{error.format_message()}", err=True)
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("weft: interrupted", err=True)
        status = 130
    except BrokenPipeError:
        # The reader of the output has ended, e.g. `head`. Redirect the rest, or the flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        if error.errno not in _OF_MACHINE and (error.errno not in _OF_FILE or error.filename is None):
            raise  # a fault of Weft, with a traceback
        where = f"{error.filename}: " if error.filename is not None else ""
        click.echo(f"weft: {where}{error.strerror}", err=True)
        status = 1
    sys.exit(status if isinstance(status, int) else 0)
