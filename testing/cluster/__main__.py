"""``python -m testing.cluster [replay SEED]``: a whole cluster on virtual time, with faults."""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from typing import NoReturn

import click

from testing.cluster.check import Violation
from testing.cluster.cluster import simulate_cluster
from testing.cluster.explore import Exploration, explore, silent_log
from testing.cluster.faults import KINDS, OF_MEMBERS
from weft.cli.processes.child import die_with_parent
from weft.common.progress import progress_bar

MOST_SHOWN = 10
"""Maximum number of listed failures."""


@click.group(
    invoke_without_command=True,
    subcommand_metavar="[replay SEED]",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--schedules", type=click.IntRange(1), default=10_000, show_default=True, help="Number of schedules."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first schedule."
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Number of processes.")
@click.pass_context
def cli(context: click.Context, schedules: int, seed: int, jobs: int) -> int:
    """Simulate a cluster with faults: many schedules, each determined by a seed.

    The cluster has API servers with the real fleet, engines with the real scheduler, a supervisor, clients,
    and a network. Every stream is compared with the expected tokens. The status is 1 if an invariant does not
    hold.
    """
    if context.invoked_subcommand is not None:
        return 0
    with progress_bar(title="simulating", unit="schedule", total=schedules, leave=False) as bar:
        found = explore(schedules, seed, jobs, bar.update, partial(die_with_parent, os.getpid()))
    click.echo(coverage(found))
    if not found.failures:
        click.echo("all invariants held")
        return 0
    for failed, what in found.failures[:MOST_SHOWN]:
        click.echo(f"seed {failed}: {what}\n    python -m testing.cluster replay {failed}")
    more = len(found.failures) - MOST_SHOWN
    click.echo(f"{len(found.failures)} schedules failed" + (f", {more} more than shown" if more > 0 else ""))
    return 1


@cli.command("replay")
@click.argument("seed", type=click.IntRange(0))
def replay_command(seed: int) -> int:
    """Show the schedule of SEED event by event, and the violated invariant.

    Each line has the virtual time and an event: a message sent (a -> b), an observation or action of a
    process (a .. b), or a request or an answer of a client (a => b).
    """
    try:
        with silent_log():  # the lines below have all events
            cluster = simulate_cluster(seed, lambda now, line: click.echo(f"{now:9.4f}  {line}"))
    except Violation as violation:
        if violation.__cause__ is not None:
            click.echo("".join(traceback.format_exception(violation.__cause__)), nl=False)
        click.echo(f"violation: {violation}")
        return 1
    click.echo(f"all invariants held over {cluster.events} events, {cluster.now:.1f} virtual seconds")
    return 0


def coverage(found: Exploration) -> str:
    """Return the faults and counts of all schedules as a table."""
    each = 1e3 * found.seconds / found.schedules
    lines = [
        f"{found.schedules} schedules, {found.events} events, {found.seconds:.1f} s of one core "
        f"({each:.1f} ms each)",
        "number of schedules with each fault:",
    ]
    lines += [f"    {kind:<40}{found.faults[kind]:>9}" for kind in (*KINDS, *OF_MEMBERS)]
    lines.append("events over all schedules:")
    lines += [f"    {name:<40}{count:>9}" for name, count in sorted(found.counts.items()) if count]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command line (by default that of this process) and end the process with the command's status: 130
    after an interrupt. Never returns.
    """
    try:
        status = cli.main(arguments, prog_name="python -m testing.cluster", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
