"""``weft plan``: watch a running server and scale its groups."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping

import click

from weft.cli.admin import admin_key_option, required_key
from weft.cli.client_cert import client_cert, client_cert_option
from weft.cli.plan.live_server import AdminRoutes, LiveServer, WantedNumbers
from weft.cli.sim.sim_options import cost_model_option, limit_options
from weft.common import env, log
from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.control.planner.capacity import Capacity, Limits
from weft.control.planner.fleet_planner import (
    ROLES,
    FleetPlanner,
    Missing,
    Observed,
    Range,
    Refused,
    Settings,
)
from weft.control.planner.observations import Meter, roles_of
from weft.sim.presets import load

logger = log.get_logger(__name__)


@click.command()
@click.option("--watch", "url", required=True, metavar="URL", help="URL of the running server.")
@limit_options(2000.0, 100.0)
@click.option(
    "--goal",
    type=click.FloatRange(0.5, 0.999),
    default=0.95,
    show_default=True,
    help="Share of requests that should meet each limit.",
)
@click.option(
    "--max",
    "most",
    multiple=True,
    required=True,
    metavar="ROLE=N",
    help="Maximum groups of a role: prefill, decode or unified. Only these roles are scaled. Repeatable.",
)
@click.option(
    "--min",
    "least",
    multiple=True,
    metavar="ROLE=N",
    help="Minimum groups of a role. Default: 1. Repeatable.",
)
@cost_model_option("a group's steps", " Measured token times scale the model.")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Maximum running sequences per group of the server.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Maximum tokens per step of the server.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 30),
    default=5.0,
    show_default=True,
    help="Seconds between two observations.",
)
@click.option(
    "--calm",
    type=click.FloatRange(1),
    default=Settings().calm_s,
    show_default=True,
    help="Seconds without need for a group before the group leaves.",
)
@click.option("--dry-run", is_flag=True, help="Log the changes, and change nothing.")
@admin_key_option
@click.option("--api-key", help="API key for /metrics. Default: the environment variable WEFT_API_KEY.")
@client_cert_option
def plan(
    url: str,
    ttft_ms: float,
    tpot_ms: float,
    goal: float,
    most: tuple[str, ...],
    least: tuple[str, ...],
    cost_name: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    interval: float,
    calm: float,
    dry_run: bool,
    admin_key: str | None,
    api_key: str | None,
) -> int:
    """Watch a running server, and scale its groups so that requests meet their limits.

    Reads /metrics and /admin/groups of the server at --watch every --interval seconds. Predicts the load,
    asks the cost model of `weft sim plan` for the number of groups of each role, and writes the number
    through /admin/scale. Adds groups at once, and removes groups one by one after a calm time. Each change is
    one log line with the numbers behind the change. Runs until a stop signal.
    """
    import httpx

    from weft.common.client_tls import client_options

    log.configure(env.get("WEFT_LOG_LEVEL", "info"), "plan")
    limits = Limits(ttft_ms / 1e3, tpot_ms / 1e3, goal)
    capacity = Capacity(load(cost_name), limits, max_num_batched_tokens, max_num_seqs)
    planner = FleetPlanner(capacity, ranges(most, least), Settings(calm_s=calm))
    key = required_key(admin_key)
    base = url.rstrip("/").removesuffix("/v1")
    with (
        httpx.Client(base_url=base, **client_options(base, client_cert())) as client,
        _stopping() as stopped,
    ):
        owner = AdminRoutes(client, key)
        server = LiveServer(client, owner, api_key or env.get("WEFT_API_KEY").split(",")[0])
        check(owner, planner.ranges)
        watch(planner, server, owner, Meter(limits), stopped, interval, dry_run)
    return 0


def ranges(most: tuple[str, ...], least: tuple[str, ...]) -> dict[str, Range]:
    """Return the allowed numbers of groups by role. Raise ConfigError."""
    high, low = _numbers(most, "--max"), _numbers(least, "--min")
    if unknown := sorted(low.keys() - high.keys()):
        raise ConfigError(f"--min {unknown[0]}: give --max {unknown[0]}=N, too", param="--min")
    found = {role: Range(low.get(role, 1), number) for role, number in high.items()}
    for role, one in found.items():
        if one.least > one.most:
            raise ConfigError(f"--min {role}={one.least} is above --max {role}={one.most}", param="--min")
    return found


def _numbers(given: tuple[str, ...], flag: str) -> dict[str, int]:
    numbers = {}
    for text in given:
        role, _, number = text.partition("=")
        if role not in ROLES or not (number.isascii() and number.isdigit() and 1 <= int(number) <= 1024):
            raise ConfigError(
                f"{flag} must be ROLE=N with a role of {', '.join(ROLES)} and 1 to 1024 groups, "
                f"not {text[:40]!r}",
                param=flag,
            )
        numbers[role] = int(number)
    return numbers


def check(owner: WantedNumbers, allowed: Mapping[str, Range]) -> None:
    """Raise ConfigError unless each planned role has groups of exactly one name on the server."""
    present = roles_of(owner.engines())
    for role in allowed:
        if role not in present:
            raise ConfigError(f"the server has no {role} groups", param="--max")
        if not present[role].base:
            raise ConfigError(
                f"the {role} groups of the server have no name, or several names: `weft scale` needs one",
                param="--max",
            )


def watch(
    planner: FleetPlanner,
    server: LiveServer,
    owner: WantedNumbers,
    meter: Meter,
    stopped: threading.Event,
    interval: float,
    dry_run: bool,
) -> None:
    """Observe and act every ``interval`` seconds, until ``stopped`` is set."""
    answers = True
    while True:
        now = time.monotonic()
        try:
            seen = meter.on(server.snapshot(), now)
        except WeftError as error:
            if answers:  # once per loss, not once per interval
                logger.warning("no observation, nothing changes: %s", error.message)
            answers, seen = False, None
            planner.on(Missing(error.message), now)
        else:
            if not answers:
                logger.info("the server answers again")
            answers = True
        for action in planner.on(Observed(seen, now), time.monotonic()) if seen is not None else ():
            logger.info("%s%s", "would scale: " if dry_run else "", action.why)
            if dry_run:
                planner.on(Refused(action.base, "dry run"), now)
                continue
            try:
                logger.info("%s", owner.write(action.base, action.groups))
            except (ConfigError, EngineDead) as error:
                logger.warning("%s groups of %s refused: %s", action.groups, action.base, error.message)
                planner.on(Refused(action.base, error.message), time.monotonic())
        if stopped.wait(interval):
            logger.info("stopped; the groups stay as they are")
            return


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stopped = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
