"""Commands for the operator of a running server: status, scale, drain, restart and revive.

Each command is one request to an admin route of the server. ``weft.front.admin`` has the routes.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click

from weft.cli.client_cert import client_cert, client_cert_option
from weft.common import env
from weft.common.errors import ConfigError, EngineDead

TIMEOUT_S = 30.0
"""Seconds to wait for an answer. Answers come before groups have loaded or drained."""
CUT_S = 10.0
"""Seconds for which ``--wait`` tolerates a server that does not answer."""
POLL_S = 0.5
"""Seconds between two looks of ``--wait``."""


class Server(NamedTuple):
    """A running server, with an admin key."""

    url: str
    key: str | None
    model: str | None = None
    """Name of the model, for a server of several models."""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer to a request of the admin key.

        Raise ConfigError without a key or after a refusal, and EngineDead without an answer.
        """
        import httpx

        from weft.common.client_tls import client_options, key_headers

        key = required_key(self.key)
        page = f"{self.url.rstrip('/').removesuffix('/v1')}{path}"
        headers = key_headers(key)
        options = client_options(page, client_cert())
        try:
            answer = httpx.request(method, page, json=body, headers=headers, timeout=TIMEOUT_S, **options)
            said = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise EngineDead(f"no Weft server answers at {self.url}: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise ConfigError(_reason(said) or f"the server answered with status {answer.status_code}")
        if not isinstance(said, dict):
            raise EngineDead(f"{self.url} is not a server of Weft")
        return said

    def change(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a change of groups, of the model if one is named. Raise as ``call``."""
        named = {} if self.model is None else {"model": self.model}
        return self.call("POST", path, {**body, **named})

    def listed(self) -> list[dict[str, Any]]:
        """Return the engines of the server, of the model if one is named. Raise as ``call``."""
        found = self.call("GET", "/admin/groups").get("engines")
        if not isinstance(found, list):
            raise EngineDead(f"{self.url} is not a server of Weft")
        return [one for one in found if self.model is None or one.get("model", self.model) == self.model]

    def engines(self) -> dict[str, Any]:
        """Return the engines of ``listed`` by name. Raise as ``call``."""
        return {one["name"]: one for one in self.listed()}


def _reason(said: Any) -> str:
    """Return the message of an error answer in OpenAI's or Ollama's form; "" without a message."""
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def required_key(given: str | None) -> str:
    """Return the admin key for a server: ``given``, or the first key in WEFT_ADMIN_KEY. Raise ConfigError
    without a key."""
    key = given or env.get("WEFT_ADMIN_KEY").partition(",")[0]
    if not key:
        raise ConfigError(
            "an admin key is required: give --admin-key or set WEFT_ADMIN_KEY", param="--admin-key"
        )
    return key


admin_key_option = click.option(
    "--admin-key", help="Admin key of the server. Default: the environment variable WEFT_ADMIN_KEY."
)


def _server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that find the server. The command gets ``server``."""

    @functools.wraps(command)
    def run(url: str, admin_key: str | None, model: str | None, **given: Any) -> Any:
        return command(server=Server(url, admin_key, model), **given)

    address = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the server."
    )
    model = click.option(
        "--model", help="First name of the model of the groups, in a server of several models."
    )
    return address(admin_key_option(model(client_cert_option(run))))


_wait = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait up to SECONDS until the change is complete; status 1 after a failure or a time-out. "
    "Default: return at once.",
)


@click.command()
@_server
def status(server: Server) -> None:
    """Print the groups of a running server: role, state and load of each engine."""
    engines = server.listed()
    several = ("model",) if any("model" in engine for engine in engines) else ()
    columns = (*several, "name", "group", "role", "state", "running", "waiting", "kv_usage")
    rows = [tuple(_cell(engine.get(column)) for column in columns) for engine in engines]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@click.command()
@click.argument("base", metavar="NAME")
@click.argument("groups", type=click.IntRange(min=0))
@_server
@_wait
def scale(server: Server, base: str, groups: int, wait: float) -> None:
    """Start or end groups of a running server until GROUPS groups have the name NAME and a number.

    For instance `weft scale decode 3` gives decode0, decode1 and decode2. Groups that drain for an earlier
    command stay before new groups start. New groups have the settings of the first group. Groups that end
    first finish their requests. The last group of a role stays, unless other groups do its work.
    """
    said = server.change("/admin/scale", {"base": base, "groups": groups})
    click.echo(said["status"])
    up, gone, drained = [*said["starting"], *said["returning"]], said["leaving"], set[str]()
    _until(server, wait, lambda engines: [*_not_up(engines, up), *_not_gone(engines, gone, drained)])


@click.command()
@click.argument("group", required=False)
@click.option("--all", "whole", is_flag=True, help="Drain and end the whole server.")
@_server
@_wait
def drain(server: Server, group: str | None, whole: bool, wait: float) -> None:
    """Drain and end a GROUP of a running server, or the whole server with --all.

    The engines of the group get no new requests, finish their requests and end. GROUP may also be the name of
    a single engine. The last group of a role stays, unless other groups do its work.
    """
    if bool(group) == whole:
        raise click.UsageError("give the name of a group, or --all for the whole server")
    said = server.change("/admin/drain", {"group": group}) if group else server.call("POST", "/admin/drain")
    click.echo(said["status"])
    drained: set[str] = set()
    _until(
        server,
        wait,
        lambda engines: ["the server drains"] if whole else _not_gone(engines, said["engines"], drained),
        ends=whole,
    )


@click.command()
@click.argument("group", required=False)
@click.option(
    "--file",
    type=click.Path(),
    help="Topology file with new settings for the groups. A group that does not come up gets its former "
    "settings again, and the restart ends.",
)
@_server
@_wait
def restart(server: Server, group: str | None, file: str | None, wait: float) -> None:
    """Replace the engines of a GROUP, or of all groups, in turn, without loss of a request.

    Each engine finishes its requests and is replaced before the next one drains. GROUP may also be the name
    of a single engine. Model, roles, ranks and --max-model-len stay as they are.
    """
    before = server.engines()
    asked = {"group": group or ""}
    if file is not None:  # a server of an earlier release refuses the parameter
        asked["topology"] = _text(file)
    said = server.change("/admin/restart", asked)
    click.echo(said["status"])
    _until(server, wait, lambda engines: _not_replaced(engines, before, said["engines"]))


def _text(file: str) -> str:
    """Return the text of ``file``. Raise ConfigError for an unreadable or empty file."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {file}: {error}", param="--file") from error
    if not text.strip():
        raise ConfigError(f"--file {file}: the file is empty", param="--file")
    return text


@click.command()
@click.argument("group")
@_server
@_wait
def revive(server: Server, group: str, wait: float) -> None:
    """Start a retired GROUP of a running server again, with a new budget of restarts.

    A group is retired after more engine deaths than --engine-restarts allows; the log and /metrics have the
    name. GROUP may also be the name of a single engine. The server needs an admin key.
    """
    said = server.change("/admin/revive", {"group": group})
    click.echo(said["status"])
    _until(server, wait, lambda engines: _not_up(engines, said["engines"]))


# -- waiting

Pending = Callable[[dict[str, Any]], list[str]]
"""Return one text per engine that has not changed yet. Raise EngineDead if the change has failed."""


def _until(server: Server, seconds: float, pending: Pending, ends: bool = False) -> None:
    """Poll until nothing is pending. Show progress on a terminal. Do nothing for 0 seconds.

    ``ends``: the server ends, so a missing answer completes the change. Raise EngineDead after a failed
    change or after ``seconds``.
    """
    began = answered = time.monotonic()
    shown = ""
    while seconds:
        try:
            engines = server.engines()
        except EngineDead:
            if ends:
                return
            if time.monotonic() - answered > CUT_S:
                raise
        else:
            answered = time.monotonic()
            now = ", ".join(pending(engines))
            if not now:
                return
            if now != shown and sys.stderr.isatty():
                click.echo(f"{answered - began:5.1f} s  {now}", err=True)
            shown = now
        if time.monotonic() - began >= seconds:
            raise EngineDead(f"the change is not complete after {seconds:g} seconds: {shown}")
        time.sleep(POLL_S)


def _not_up(engines: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the engines of ``names`` that are not up yet. Raise EngineDead if one cannot come up."""
    left = []
    for name in names:
        engine = engines.get(name)
        if engine is None:
            left.append(f"{name} absent")
            continue
        if engine["state"] in ("retired", "ended"):
            raise EngineDead(f"{name} did not start; the server's log has the reason")
        if engine["state"] != "running" or not engine["alive"]:
            left.append(f"{name} {engine['state']}")
    return left


def _not_gone(engines: dict[str, Any], names: Iterable[str], drained: set[str]) -> list[str]:
    """Return the engines of ``names`` that have not left yet. Raise EngineDead if one stays.

    ``drained``: engines that left at an earlier look; updated. Outside a server's own processes an engine
    learns of a drain late.
    """
    left = [name for name in names if name in engines]
    for name in left:
        if engines[name]["state"] == "leaving":
            drained.add(name)
        elif name in drained:
            raise EngineDead(f"{name} stays: another command took the engine back")
    return [f"{name} {engines[name]['state']}" for name in left]


def _not_replaced(engines: dict[str, Any], before: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the engines of ``names`` that are not replaced yet. ``before``: the engines before the restart.

    Raise EngineDead after the end of a restart: a replacement did not come up, or the engine left.
    """
    left = []
    for name in names:
        engine, old = engines.get(name), before.get(name)
        if engine is None:
            raise EngineDead(f"{name} has left the server")
        again = old is not None and engine["starts"] > old["starts"] + 1
        if again or engine["state"] in ("retired", "ended"):
            why = f": {engine['failure']}" if engine.get("failure") else ""  # not in earlier releases
            raise EngineDead(
                f"{name} did not start again, and the restart is cancelled{why}; the server's log has more"
            )
        new = engine["incarnation"] not in ("", old["incarnation"] if old is not None else "")
        if not new or engine["state"] != "running" or not engine["alive"]:
            left.append(f"{name} {engine['state'] if new or engine['state'] != 'running' else 'waits'}")
    return left


def _cell(value: Any) -> str:
    """Return a table cell: a fraction as a percentage, and a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.0%}" if isinstance(value, float) else str(value)
