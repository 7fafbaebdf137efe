"""Commands for the operator of a running server: status, scale, drain, restart and revive.

Each command is one request to an admin route of the server. ``weft.front.admin`` has the routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from weft.cli.client_cert import client_cert, client_cert_option
from weft.common import env
from weft.common.errors import ConfigError, EngineDead

TIMEOUT_S = 30.0
"""Seconds to wait for an answer. Answers come before groups have loaded or drained."""
POLL_S = 0.5
"""Seconds between two looks of ``--wait``."""


def _server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that find the server."""
    key = click.option(
        "--admin-key", help="Admin key of the server. Default: the environment variable WEFT_ADMIN_KEY."
    )
    url = click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the server.")
    return url(key(client_cert_option(command)))


_wait = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait up to SECONDS until the change is complete. Default: return at once.",
)


@click.command()
@_server
def status(url: str, admin_key: str | None) -> None:
    """Print the groups of a running server: role, state and load of each engine."""
    engines = _call(url, admin_key, "GET", "/admin/groups")["engines"]
    columns = ("name", "group", "role", "state", "running", "waiting", "kv_usage")
    rows = [tuple(_cell(engine.get(column)) for column in columns) for engine in engines]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@click.command()
@click.argument("base", metavar="NAME")
@click.argument("groups", type=click.IntRange(min=0))
@_server
@_wait
def scale(base: str, groups: int, url: str, admin_key: str | None, wait: float) -> None:
    """Start or end groups of a running server until GROUPS groups have the name NAME and a number.

    For instance `weft scale decode 3` gives decode0, decode1 and decode2. New groups have the settings of the
    first group. Groups that end first finish their requests. The last group of a role stays.
    """
    said = _call(url, admin_key, "POST", "/admin/scale", {"base": base, "groups": groups})
    click.echo(said["status"])
    until = time.monotonic() + wait
    while wait and not (done := _changed(url, admin_key, said)) and time.monotonic() < until:
        time.sleep(POLL_S)
    if wait and not done:
        raise EngineDead(f"the groups have not changed within {wait:g} seconds; see `weft status`")


@click.command()
@click.argument("group", required=False)
@click.option("--all", "whole", is_flag=True, help="Drain and end the whole server.")
@_server
def drain(group: str | None, whole: bool, url: str, admin_key: str | None) -> None:
    """Drain and end a GROUP of a running server, or the whole server with --all.

    The engines of the group get no new requests, finish their requests and end. GROUP may also be the name of
    a single engine. The last group of a role stays.
    """
    if bool(group) == whole:
        raise click.UsageError("give the name of a group, or --all for the whole server")
    click.echo(_call(url, admin_key, "POST", "/admin/drain", {"group": group} if group else None)["status"])


@click.command()
@click.argument("group", required=False)
@_server
def restart(group: str | None, url: str, admin_key: str | None) -> None:
    """Replace the engines of a GROUP, or of all groups, in turn, without loss of a request.

    Each engine finishes its requests and is replaced before the next one drains. GROUP may also be the name
    of a single engine.
    """
    click.echo(_call(url, admin_key, "POST", "/admin/restart", {"group": group or ""})["status"])


@click.command()
@click.argument("group")
@_server
def revive(group: str, url: str, admin_key: str | None) -> None:
    """Start a retired GROUP of a running server again, with a new budget of restarts.

    A group is retired after more engine deaths than --engine-restarts allows; the log and /metrics have the
    name. GROUP may also be the name of a single engine. The server needs an admin key.
    """
    click.echo(_call(url, admin_key, "POST", "/admin/revive", {"group": group})["status"])


def _changed(url: str, key: str | None, change: Any) -> bool:
    """Return True if all engines that start are up, and all engines that leave are gone.

    Raise EngineDead if an engine that starts is retired.
    """
    engines = {one["name"]: one for one in _call(url, key, "GET", "/admin/groups")["engines"]}
    starting = [engines.get(name) for name in change["starting"]]
    for engine in starting:
        if engine is not None and engine["state"] == "retired":
            raise EngineDead(f"{engine['name']} did not start; the server's log has the reason")
    up = all(one is not None and one["state"] == "running" and one["alive"] for one in starting)
    return up and not engines.keys() & set(change["leaving"])


def _call(url: str, admin_key: str | None, method: str, path: str, body: Any = None) -> Any:
    """Return the server's answer to a request of the admin key.

    Raise ConfigError without a key or after a refusal, and EngineDead without an answer.
    """
    import httpx

    from weft.common.client_tls import verification

    key = admin_key or env.get("WEFT_ADMIN_KEY")
    if not key:
        raise ConfigError(
            "an admin key is required: give --admin-key or set WEFT_ADMIN_KEY", param="--admin-key"
        )
    page = f"{url.rstrip('/').removesuffix('/v1')}{path}"
    headers = {"Authorization": f"Bearer {key}"}
    verify = verification(page, client_cert())
    try:
        answer = httpx.request(method, page, json=body, headers=headers, timeout=TIMEOUT_S, verify=verify)
        said = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EngineDead(f"no Weft server answers at {url}: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise ConfigError(
            said.get("error", {}).get("message", f"the server answered with status {answer.status_code}")
        )
    return said


def _cell(value: Any) -> str:
    """Return a table cell: a fraction as a percentage, and a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.0%}" if isinstance(value, float) else str(value)
