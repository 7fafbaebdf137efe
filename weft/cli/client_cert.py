"""``--client-cert`` of the commands that talk to a running server."""

from __future__ import annotations

import click


def _keep(context: click.Context, param: click.Parameter, value: str | None) -> None:
    """Store the path as the object of the context, for ``client_cert``."""
    context.obj = value


client_cert_option = click.option(
    "--client-cert",
    type=click.Path(),
    expose_value=False,
    callback=_keep,
    help="PEM file with a certificate and its key, for a server that requires certificates. "
    "SSL_CERT_FILE names the authorities to trust.",
)


def client_cert() -> str | None:
    """Return the path of ``--client-cert`` of the running command; None without one."""
    context = click.get_current_context(silent=True)
    return context.obj if context is not None and isinstance(context.obj, str) else None
