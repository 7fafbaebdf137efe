"""``weft revive``: starts a retired group of a running server again."""

from __future__ import annotations

import click

from weft.common import env
from weft.common.errors import ConfigError, EngineDead

TIMEOUT_S = 30.0
"""Seconds to wait for the answer. The answer comes before the group has loaded."""


@click.command()
@click.argument("group")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the server.")
@click.option(
    "--admin-key", help="Admin key of the server. Default: the environment variable WEFT_ADMIN_KEY."
)
def revive(group: str, url: str, admin_key: str | None) -> None:
    """Start a retired GROUP of a running server again, with a new budget of restarts.

    A group is retired after more engine deaths than --engine-restarts allows; the log and /metrics have the
    name. GROUP may also be the name of a single engine. The server needs an admin key.
    """
    import httpx

    key = admin_key or env.get("WEFT_ADMIN_KEY")
    if not key:
        raise ConfigError(
            "an admin key is required: give --admin-key or set WEFT_ADMIN_KEY", param="--admin-key"
        )
    page = f"{url.rstrip('/').removesuffix('/v1')}/admin/revive"
    headers = {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(page, json={"group": group}, headers=headers, timeout=TIMEOUT_S)
        said = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EngineDead(f"no Weft server answers at {url}: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise ConfigError(
            said.get("error", {}).get("message", f"the server answered with status {answer.status_code}")
        )
    click.echo(said["status"])
