"""``weft pull``, ``weft list``, ``weft ps`` and ``weft run``: models of this machine and of a server, by the
commands that users of Ollama know."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import msgspec

from weft.cli.chat.chat_command import DEFAULT_URL, Talk, key_for, talk_to
from weft.cli.client_cert import client_cert, client_cert_option
from weft.common.errors import ConfigError
from weft.config import hub
from weft.config.sizing.memory import show_bytes


@click.command()
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a hub model. Default: the default branch.")
def pull(model: str, revision: str | None) -> None:
    """Download MODEL, a hub name (owner/name), to the hub's local cache. Prints the folder.

    A model that Weft does not serve is refused before the download of the weights. HF_TOKEN gives access to
    gated models, HF_ENDPOINT names another hub.
    """
    click.echo(hub.resolve_model_path(model, revision))


@click.command(name="list")
def list_models() -> None:
    """List the models on this machine: bundled models, and models in the hub's local cache."""
    rows = [(name, _folder_bytes(Path(folder)), "bundled") for name, folder in hub.bundled_models().items()]
    rows += [(name, size, "hub") for name, size in hub.cached_sizes()]
    width = max((len(name) for name, _, _ in rows), default=0)
    click.echo(f"{'NAME':{width}}  {'SIZE':>10}  SOURCE")
    for name, size, source in rows:
        click.echo(f"{name:{width}}  {show_bytes(size):>10}  {source}")


@click.command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="URL of the server.")
@click.option("--api-key", help="API key of the server. Prefer the environment variable WEFT_CHAT_API_KEY.")
@client_cert_option
def ps(url: str, api_key: str | None) -> None:
    """List the models that a running server has loaded."""
    root = _root_of(url)
    rows = _loaded(root, api_key or key_for(url))
    width = max((len(row.name) for row in rows), default=4)
    click.echo(f"{'NAME':{width}}  {'SIZE':>10}  {'CONTEXT':>8}  PROCESSOR")
    for row in rows:
        processor = "GPU" if row.size_vram else "CPU"
        size, context = show_bytes(row.size), row.context_length
        click.echo(f"{row.name:{width}}  {size:>10}  {context:>8}  {processor}")


@click.command()
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option("--url", help=f"URL of a server that may have the model.  [default: {DEFAULT_URL}]")
@click.option("--api-key", help="API key of the server. Prefer the environment variable WEFT_CHAT_API_KEY.")
@client_cert_option
@click.option("--system", default="", help="The system message.")
def run(model: str, prompt: tuple[str, ...], url: str | None, api_key: str | None, system: str) -> int:
    """Talk to MODEL. With a PROMPT, print the reply and end.

    A running server that has the model is used. Otherwise a server is started for the conversation. weft chat
    has more settings.
    """
    from weft.cli.chat.chat_client import ChatClient, ChatError
    from weft.cli.chat.chat_server import OwnServer
    from weft.cli.chat.chat_session import ChatHistory
    from weft.cli.chat.chat_view import PlainView

    place = url or DEFAULT_URL
    _root_of(place)
    with contextlib.ExitStack() as stack:
        key = api_key or key_for(place)
        if not _serves(place, key, model, url is not None):
            if url is not None:
                raise ConfigError(f"the server at {url} does not have the model {model}", param="--url")
            own = stack.enter_context(OwnServer(model, (), key))
            click.echo(f"starting a server for {model} ...", err=True)
            place, model = own.url(), ""
        if not prompt:
            return talk_to(place, key, model or None, system)
        client = ChatClient(place, key, client_cert=client_cert())
        stack.callback(client.close)
        try:
            history = ChatHistory(model or client.models()[0], system, {})
            return Talk(client, history, OneLine(" ".join(prompt)), PlainView()).run()
        except ChatError as error:
            raise ConfigError(str(error)) from None


class _Row(msgspec.Struct):
    """A loaded model of /api/ps."""

    name: str
    size: int
    size_vram: int = 0
    context_length: int = 0


class _Loaded(msgspec.Struct):
    """Answer of /api/ps."""

    models: list[_Row]


class OneLine:
    """Input of a single message."""

    stays = False

    def __init__(self, text: str) -> None:
        self._left: list[str] = [text]

    def ask(self, prompt: str = "") -> str | None:
        """Return the message; None at each later call."""
        return self._left.pop() if self._left else None


def _serves(url: str, key: str, model: str, named: bool) -> bool:
    """Return True if a server at ``url`` has ``model``. False without a server, or with a server that
    refuses; for a ``named`` URL raise ConfigError instead."""
    from weft.cli.chat.chat_client import ChatClient, ChatError

    client = ChatClient(url, key, timeout=10.0, client_cert=client_cert())
    try:
        return client.has(model)
    except ChatError as error:
        if named:
            raise ConfigError(str(error), param="--url") from None
        return False
    finally:
        client.close()


def _root_of(url: str) -> str:
    """Return the URL of a server without /v1. Raises ConfigError for a text that is no URL."""
    from weft.cli.chat.chat_client import base_url

    return base_url(url).removesuffix("/v1")


def _loaded(root: str, key: str) -> list[_Row]:
    """Return the rows of /api/ps of the server at ``root``. Raises ConfigError without a valid answer."""
    import httpx

    from weft.common.client_tls import client_options, key_headers

    headers = key_headers(key)
    options = client_options(root, client_cert())
    try:
        answer = httpx.get(f"{root}/api/ps", headers=headers, timeout=10.0, **options)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(f"{root} does not answer: {error}", param="--url") from None
    if answer.status_code != 200:
        raise ConfigError(f"{root} answered {answer.status_code}: {answer.text[:200]!r}", param="--url")
    try:
        return msgspec.json.decode(answer.content, type=_Loaded).models
    except msgspec.MsgspecError:
        raise ConfigError(f"{root} is not a server of Weft: /api/ps has no models", param="--url") from None


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
