"""``weft build-ops``: compiles the CPU extension, once per machine."""

from __future__ import annotations

import click

from weft.common.errors import ConfigError
from weft.ops.cpu import build


@click.command("build-ops")
@click.option("--force", is_flag=True, help="Compile again what is built already.")
@click.option("--verbose", is_flag=True, help="Print the compiler's command lines and warnings.")
def build_ops(force: bool, verbose: bool) -> None:
    """Compile the C++ operations for this machine's CPU (half a minute, once; needs g++ or clang++).

    Without them Weft runs on torch's operations, which are slower on a CPU.
    """
    try:
        build.build(force=force, verbose=verbose, say=click.echo)
    except build.BuildError as error:
        if error.output:
            click.echo(error.output, err=True)
        raise
    except OSError as error:
        why = (error.strerror or "unknown reason").lower()
        raise ConfigError(
            f"the C++ operations can't be kept in their folder ({why}): set WEFT_OPS_CACHE to a folder that "
            "this user may write"
        ) from error
