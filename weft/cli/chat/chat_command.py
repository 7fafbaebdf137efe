"""``weft chat``: a conversation with any OpenAI-compatible server, on a terminal or in a pipe."""

from __future__ import annotations

import base64
import contextlib
import glob
import json
import mimetypes
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weft.cli.client_cert import client_cert, client_cert_option
from weft.common import env
from weft.common.errors import ConfigError
from weft.common.folder import expanded, home_folder

if TYPE_CHECKING:
    from weft.cli.chat.chat_client import ChatClient
    from weft.cli.chat.chat_input import Lines
    from weft.cli.chat.chat_session import ChatCommand, ChatHistory
    from weft.cli.chat.chat_view import View

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000/v1"
_URL = re.compile(r"\w+://|[\w.-]+:\d+")
MAX_TOOL_ROUNDS = 32
"""Maximum number of consecutive replies with tool calls; then the user must write again."""

#: Field of a request, its type on a command line, and its help.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("temperature", float, "Sampling temperature. 0: greedy."),
    ("top_p", float, "Keep the most likely tokens up to this total probability."),
    ("max_tokens", int, "Maximum tokens per reply."),
    ("seed", int, "Seed of sampling, for repeatable replies."),
    ("top_k", int, "Keep the k most likely tokens (not in every server)."),
    ("min_p", float, "Drop tokens below this share of the highest probability (not in every server)."),
    ("frequency_penalty", float, "Penalty for each earlier occurrence of a token in the reply."),
    ("presence_penalty", float, "Penalty for tokens that occur in the reply."),
    ("reasoning_effort", str, "Amount of reasoning: low, medium, high."),
)


def request_settings(function: F) -> F:
    """Add a flag for each optional field of a request."""
    for name, kind, text in reversed(_SETTINGS):
        function = click.option(f"--{name.replace('_', '-')}", type=kind, help=text)(function)
    return function


@click.command()
@click.argument("words", metavar="[URL|MODEL] [-- FLAGS OF WEFT SERVE]", nargs=-1)
@click.option("--url", help=f"URL of the server.  [default: {DEFAULT_URL}]")
@click.option(
    "--api-key",
    help="API key of the server. Prefer the environment variable WEFT_CHAT_API_KEY, or WEFT_API_KEY for a "
    "server on this machine.",
)
@client_cert_option
@click.option("--model", help="Name of the model. Default: the first model that the server lists.")
@click.option("--system", default="", help="The system message.")
@request_settings
@click.option(
    "--tools", type=click.Path(), help="JSON file with a list of tools. You type the results of calls."
)
@click.option("--history-file", type=click.Path(), help="File that keeps your inputs between sessions.")
@click.option(
    "--history/--no-history", default=True, help="Keep your inputs between sessions.  [default: keep]"
)
def chat(
    words: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    model: str | None,
    system: str,
    tools: str | None,
    history_file: str | None,
    history: bool,
    **given: Any,
) -> int:
    """Talk to a model on the terminal.

    With a URL, talk to the given server (any server with OpenAI's API). With a MODEL, start a server for the
    conversation; FLAGS are flags of the new server. Without either, talk to the server on this machine.
    Without a terminal, each line of standard input is a message.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    if tools is not None:
        settings["tools"] = read_tools(tools)
    target, flags = (words[0], words[1:]) if words else (None, ())
    is_url = target is not None and _URL.match(target) is not None
    if is_url and url is not None:
        raise ConfigError("a URL and --url are the same setting: give one of them", param="--url")
    # ``server``: model of a new server. ``place``: URL of an existing server. None for the default URL.
    server, place = (None, url or target) if is_url or target is None else (target, url)
    if server is not None and place is not None:
        raise ConfigError(
            f"MODEL {server!r} starts a server, and --url names a running server: give one of them"
        )
    if flags and server is None:
        raise ConfigError("flags of weft serve require a MODEL, for which weft chat starts a server")
    from weft.cli.chat.chat_server import OwnServer

    with contextlib.ExitStack() as stack:
        if server is not None:
            own = stack.enter_context(OwnServer(server, flags, api_key or ""))
            click.echo(f"starting a server for {server} ...", err=True)
            place = own.url()
        at = place or DEFAULT_URL
        kept = None if not history else Path(history_file) if history_file else _history_path()
        return _converse(
            at, api_key or key_for(at), model, system, settings, kept, target is None and url is None
        )


def read_tools(path: str) -> list[Any]:
    """Return the tools of a file in the form of requests. Raise ConfigError."""
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--tools {path}: {error.strerror or 'cannot be read'}", param="--tools") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--tools {path} is not valid JSON", param="--tools") from None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"--tools {path} must be a list of tools: objects with a type and a function")
    # A bare function is accepted too, and gets the wrapper of the API.
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


_TYPES = {".mkv": "video/x-matroska", ".m4v": "video/mp4", ".webp": "image/webp"}


def image_url(name: str, kinds: tuple[str, ...] = ("image/",)) -> str:
    """Return an image in the form of requests: an http(s) or ``data:`` URL unchanged, a file as a ``data:``
    URL.

    ``kinds``: permitted types. Raise ConfigError for an unreadable file, or a name with another suffix.
    """
    if name.startswith(("http://", "https://", "data:")):
        return name
    path = expanded(name)
    # Not every system's table has these types.
    kind = _TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith(kinds):
        also = ", or of a video: .mp4, .mov, .webm, .mkv, .gif" if "video/" in kinds else ""
        raise ConfigError(
            f"{name} does not have the extension of an image: .png, .jpg, .webp, .gif, .bmp{also}"
        )
    try:
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise ConfigError(f"{name}: {(error.strerror or 'cannot be read').lower()}") from None


def frame_urls(names: str) -> list[str]:
    """Return the frames of a video, or a single video file, in the form of requests.

    ``names``: files, URLs or patterns, quoted as in a shell; sorted. Raise ConfigError for an open quote.
    """
    try:
        words = shlex.split(names)
    except ValueError:
        raise ConfigError(f"{names} has an opening quote without a closing quote") from None
    found = []
    for word in words:
        pattern = str(expanded(word)) if "*" in word else ""
        found += sorted(glob.glob(pattern)) or [word]
    kinds = ("image/", "video/") if len(found) == 1 else ("image/",)
    return [image_url(name, kinds) for name in found]


def key_for(url: str) -> str:
    """Return the API key from the environment for the server at ``url``, or "".

    The key of Weft's own servers (WEFT_API_KEY) is only sent to servers on this machine.
    """
    from weft.cli.chat.chat_client import base_url
    from weft.common.client_tls import is_local

    own = env.get("WEFT_CHAT_API_KEY")
    if own or not is_local(base_url(url)):
        return own
    return env.get("WEFT_API_KEY").replace(",", " ").split(" ")[0]


def talk_to(url: str, api_key: str, model: str | None, system: str) -> int:
    """Talk to the server at ``url`` with the default settings, and return the exit status."""
    return _converse(url, api_key, model, system, {}, _history_path(), False)


def _history_path() -> Path:
    """Return the default path of the input history."""
    state = env.get("XDG_STATE_HOME")
    return (Path(state) if state else home_folder() / ".local" / "state") / "weft" / "chat_history"


def _converse(
    url: str,
    api_key: str,
    model: str | None,
    system: str,
    settings: dict[str, Any],
    history: Path | None,
    assumed: bool,
) -> int:
    """Talk until the user leaves and return the exit status. Raise ConfigError if the server fails.

    ``assumed``: True if the user named no server.
    """
    from weft.cli.chat.chat_client import ChatClient, ChatError, NothingThere
    from weft.cli.chat.chat_session import ChatHistory
    from weft.cli.chat.chat_view import PlainView

    client = ChatClient(url, api_key, client_cert=client_cert())
    try:
        # With --model the list of models is not needed.
        cards = dict([] if model else client.cards())
        names = list(cards)
        if not (model or names):
            raise ConfigError(f"the server at {client.url} lists no model: give --model", param="--model")
        conversation = ChatHistory(model or names[0], system, settings)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            from weft.cli.chat.chat_input import PlainLines

            return Talk(client, conversation, PlainLines(), PlainView()).run()
        return _on_terminal(client, conversation, history, cards.get(conversation.model, ""))
    except NothingThere as gone:
        hint = "start a server with `weft serve` or `weft chat MODEL`, or give --url"
        raise ConfigError(f"{gone}: {hint if assumed else 'is the server running?'}", param="--url") from None
    except ChatError as error:
        raise ConfigError(str(error)) from None
    finally:
        client.close()


def _on_terminal(client: ChatClient, conversation: ChatHistory, history: Path | None, about: str) -> int:
    """Talk on a terminal and return the exit status. ``about``: abilities of the model, "" if unknown."""
    from rich.console import Console

    from weft.cli.chat.chat_input import TerminalLines
    from weft.cli.chat.chat_view import RichView

    view = RichView(Console(highlight=False))
    view.note(f"{conversation.model} at {client.url}. /help shows commands, Ctrl-D leaves.")
    if about:
        view.note(about)
    return Talk(client, conversation, TerminalLines(history, view.note), view).run()


class Interrupts:
    """Handle Ctrl-C during a reply. Use in the main thread only.

    Raise KeyboardInterrupt at once, and again before the next piece: an exception raised inside a finalizer
    is lost.
    """

    def __enter__(self) -> Interrupts:
        self._came = False
        self._before = signal.signal(signal.SIGINT, self._on)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def watch(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield ``pieces``. Raise KeyboardInterrupt after Ctrl-C."""
        for piece in pieces:
            if self._came:
                raise KeyboardInterrupt
            yield piece

    def _on(self, number: int, frame: object) -> None:
        """Note the signal and raise KeyboardInterrupt."""
        # The flag survives if a finalizer swallows the exception.
        self._came = True
        raise KeyboardInterrupt


class Talk:
    """The main loop: read input, send messages, show replies."""

    def __init__(self, client: ChatClient, conversation: ChatHistory, lines: Lines, view: View) -> None:
        self._client = client
        self._conversation = conversation
        self._lines = lines
        self._view = view
        self._failed = False

    def run(self) -> int:
        """Run until the end of input or /quit.

        Return the exit status: 1 if the last message got no reply. Ctrl-C drops the line or stops the reply
        on a terminal, and raises KeyboardInterrupt in a pipe.
        """
        from weft.cli.chat.chat_session import ChatCommand, Say, Unknown, read_input

        while True:
            try:
                text = self._lines.ask()
            except KeyboardInterrupt:
                # On a terminal Ctrl-C only drops the line. In a pipe Ctrl-C ends the program.
                if not self._lines.stays:
                    raise
                self._view.note("Ctrl-D leaves")
                continue
            if text is None:
                return int(self._failed)
            asked = read_input(text)
            if isinstance(asked, Say):
                self._failed = not self._say(asked.text)
            elif isinstance(asked, ChatCommand):
                if asked.name == "/quit":
                    return 0
                self._command(asked)
            elif isinstance(asked, Unknown):
                self._view.problem(f"no command {asked.name}: /help lists them; // begins a message with /")

    def _say(self, text: str) -> bool:
        """Send a message, and answer tool calls until a reply has none.

        Return False if no reply came; the message is then removed. An interrupted reply counts as a reply.
        """
        from weft.cli.chat.chat_client import ChatError
        from weft.cli.chat.chat_session import Reply

        self._conversation.say(text)
        for _ in range(MAX_TOOL_ROUNDS):
            reply = Reply()
            try:
                stream = self._client.stream(self._conversation.body())
                with contextlib.closing(stream) as pieces, Interrupts() as interrupts:
                    self._view.show(interrupts.watch(pieces), reply)
            except KeyboardInterrupt:
                if not self._lines.stays:
                    raise
                self._view.note("(stopped)")
                self._conversation.add_reply(reply)
                return True
            # The server refused or failed: remove the message, so that the conversation stays usable.
            except ChatError as error:
                self._view.problem(str(error))
                self._conversation.take_back()
                return False
            self._conversation.add_reply(reply)
            if not reply.calls or not self._answer(reply.calls):
                return True
        self._view.note(
            f"(the limit of {MAX_TOOL_ROUNDS} rounds of tool calls is reached: write a message to continue)"
        )
        return True

    def _answer(self, calls: Sequence[Any]) -> bool:
        """Ask the user for the result of each tool call.

        Return False if the user gives no result; the user's message and its replies are then removed.
        """
        for call in calls:
            try:
                result = self._lines.ask(f"{call.name} gives: ")
            except KeyboardInterrupt:
                if not self._lines.stays:
                    raise
                result = None
            if result is None:
                self._conversation.take_back()
                self._view.note("(the calls have no results: your last message is removed)")
                return False
            self._conversation.answer_call(call, result.strip())
        return True

    def _command(self, asked: ChatCommand) -> None:
        """Carry out a command and show the result. Failures are shown, not raised."""
        from weft.cli.chat.chat_client import ChatError
        from weft.cli.chat.chat_session import COMMANDS

        conversation, argument = self._conversation, asked.argument
        if asked.name == "/help":
            for name, about in COMMANDS.items():
                self._view.note(f"{name:8} {about}")
            self._view.note(
                'Alt-Enter begins a new line; so does Enter behind """, until """ ends the message.'
            )
        elif asked.name == "/reset":
            conversation.reset()
            self._view.note("a new conversation")
        elif asked.name == "/system":
            if argument:
                conversation.system = "" if argument == "-" else argument
            self._view.note(f"system message: {conversation.system or 'none'}")
        elif asked.name == "/image":
            self._image(argument)
        elif asked.name == "/video":
            self._video(argument)
        elif asked.name == "/save":
            self._save(argument)
        else:
            # The remaining command is /model.
            try:
                names = self._client.models()
            except ChatError as error:
                self._view.problem(str(error))
                return
            if argument and argument not in names:
                self._view.problem(f"the server has no model {argument!r}")
            conversation.model = argument if argument in names else conversation.model
            for name in names:
                self._view.note(f"{'*' if name == conversation.model else ' '} {name}")

    def _image(self, name: str) -> None:
        """Add an image to the next message; "-" removes all. A failure is shown, not raised."""
        images = self._conversation.images
        if name == "-":
            images.clear()
        elif name:
            try:
                images.append(image_url(name))
            except ConfigError as error:
                self._view.problem(error.message)
                return
        self._view.note(f"images of the next message: {len(images)}")

    def _video(self, names: str) -> None:
        """Add a video to the next message; "-" removes all. A failure is shown, not raised."""
        videos = self._conversation.videos
        if names == "-":
            videos.clear()
        elif names:
            try:
                videos.append(frame_urls(names))
            except ConfigError as error:
                self._view.problem(error.message)
                return
        counts = ", ".join(str(len(frames)) for frames in videos)
        self._view.note(
            f"videos of the next message: {len(videos)}" + (f" (files: {counts})" if counts else "")
        )

    def _save(self, name: str) -> None:
        """Write the conversation to a new file that only the user can read: Markdown for ``.md``, else JSON.

        A failure is shown, not raised.
        """
        if not name:
            self._view.problem("/save needs the name of a file")
            return
        markdown = name.endswith(".md")
        text = self._conversation.as_markdown() if markdown else self._conversation.as_json()
        path = expanded(name)
        try:
            # O_EXCL: never overwrite a file.
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(text)
        except FileExistsError:
            self._view.problem(f"{name} exists: give another name")
        except OSError as error:
            self._view.problem(f"{name}: {(error.strerror or 'cannot be written').lower()}")
        else:
            self._view.note(f"saved to {path}")
