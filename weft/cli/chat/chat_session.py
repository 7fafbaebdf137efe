"""A conversation of ``weft chat`` as data, and the parsing of user input. No input or output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from weft.cli.chat.chat_client import AnswerPiece, CallPart, End, Piece, ReasoningPiece

QUOTES = '"""'
COMMANDS = {
    "/reset": "forget the conversation; the system message stays",
    "/system": "/system TEXT sets the system message, /system - removes it, /system shows it",
    "/image": "/image FILE or URL adds an image to the next message; /image - removes all images",
    "/video": "/video FILE.mp4 or frames/*.jpg adds a video, also as frames; /video - removes all videos",
    "/save": "/save FILE writes the conversation as JSON, or as Markdown to *.md",
    "/model": "/model NAME continues with another model, /model lists the models",
    "/help": "show this",
    "/quit": "leave (so does Ctrl-D)",
}


class Say(msgspec.Struct, frozen=True):
    """A message to the model."""

    text: str


class ChatCommand(msgspec.Struct, frozen=True):
    """A command of ``COMMANDS``, with its argument."""

    name: str
    argument: str


class Nothing(msgspec.Struct, frozen=True):
    """An empty line."""


class Unknown(msgspec.Struct, frozen=True):
    """A word that starts like a command, but is none."""

    name: str


Input: TypeAlias = Say | ChatCommand | Nothing | Unknown


def unfinished(text: str) -> bool:
    """Return True if the text opens with three quotes and the quotes are not closed yet."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and (len(stripped) < 6 or not stripped.endswith(QUOTES))


def read_input(text: str) -> Input:
    """Parse a whole input. Two leading slashes escape a message that starts with a slash."""
    stripped = text.strip()
    if not stripped:
        return Nothing()
    if stripped.startswith(QUOTES):
        inner = stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return Say(inner) if inner.strip() else Nothing()
    if stripped.startswith("//"):
        return Say(stripped[1:])
    if stripped.startswith("/"):
        name, _, argument = stripped.partition(" ")
        name = {"/exit": "/quit", "/q": "/quit", "/?": "/help"}.get(name, name)
        return ChatCommand(name, argument.strip()) if name in COMMANDS else Unknown(name)
    return Say(stripped)


class ChatCall(msgspec.Struct):
    """A tool call of a reply."""

    id: str
    name: str
    arguments: str = ""


class Reply:
    """A reply, as far as received."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ChatCall] = []
        self.end: End | None = None
        """None until the reply ends; stays None after an interruption."""

    def take(self, piece: Piece) -> None:
        """Add the next piece to ``text``, ``reasoning`` or ``calls``; the last piece sets ``end``."""
        # Text, reasoning and tool calls may alternate.
        if isinstance(piece, AnswerPiece):
            self.text += piece.text
        elif isinstance(piece, ReasoningPiece):
            self.reasoning += piece.text
        elif isinstance(piece, CallPart):
            self._call(piece)
        else:
            self.end = piece

    def _call(self, part: CallPart) -> None:
        """Add a piece of a tool call."""
        # Parts of several calls may interleave; the index tells the calls apart.
        while len(self.calls) <= part.index:
            self.calls.append(ChatCall("", ""))
        call = self.calls[part.index]
        call.id = call.id or part.id
        call.name += part.name
        call.arguments += part.arguments

    def message(self) -> dict[str, Any]:
        """Return the reply as a message of the conversation."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return made


class ChatHistory:
    """All messages so far, and the settings of each request."""

    def __init__(self, model: str, system: str, settings: dict[str, Any]) -> None:
        """``settings``: fields of every request, such as ``temperature`` and ``tools``."""
        self.model = model
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.images: list[str] = []
        """URLs of images for the user's next message."""
        self.videos: list[list[str]] = []
        """Videos for the user's next message: URLs of the frames of each video, or of one video file."""
        self._settings = settings

    def body(self) -> dict[str, Any]:
        """Return the body of the next request."""
        return {**self._settings, "model": self.model, "messages": self._whole()}

    def say(self, text: str) -> None:
        """Add the user's next message, with the pending images and videos, which are then removed from the
        pending lists.
        """
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        videos = [urls[0] if len(urls) == 1 else urls for urls in self.videos]
        shown = [*images, *({"type": "video", "video": video} for video in videos)]
        self._show_nothing()
        content: Any = [*shown, {"type": "text", "text": text}] if shown else text
        self.messages.append({"role": "user", "content": content})

    def add_reply(self, reply: Reply) -> None:
        """Add a complete or interrupted reply.

        An interrupted ``reply`` loses its calls, in place. An empty interrupted reply removes the user's
        message instead.
        """
        stopped = reply.end is None
        if stopped:
            reply.calls = []  # the last call may have incomplete arguments
        if reply.text or reply.calls or not stopped:
            self.messages.append(reply.message())
        else:
            self.take_back()

    def answer_call(self, call: ChatCall, result: str) -> None:
        """Add the result of a tool call."""
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def take_back(self) -> None:
        """Remove the user's last message and all later messages, because the server refused the message."""
        # Also removes replies and tool results after the message.
        while self.messages and self.messages.pop()["role"] != "user":
            pass

    def reset(self) -> None:
        """Remove all messages and pending images."""
        self.messages.clear()
        self._show_nothing()

    def as_json(self) -> str:
        """Return the model and all messages as JSON."""
        return (
            json.dumps({"model": self.model, "messages": self._whole()}, ensure_ascii=False, indent=2) + "\n"
        )

    def as_markdown(self) -> str:
        """Return the conversation as Markdown, with a heading per message."""
        parts = [f"# Conversation with {self.model}\n"]
        for message in self._whole():
            parts.append(f"## {message['role'].capitalize()}\n\n{_shown(message['content'])}\n")
            for call in message.get("tool_calls", ()):
                function = call["function"]
                parts.append(f"Calls `{function['name']}` with `{function['arguments']}`\n")
        return "\n".join(parts)

    def _show_nothing(self) -> None:
        """Drop the pending images and videos."""
        self.images.clear()
        self.videos.clear()

    def _whole(self) -> list[dict[str, Any]]:
        """Return all messages, with the system message first."""
        first: Sequence[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]


def _shown(content: Any) -> str:
    """Return a message's content as text. Images appear as URL or type, videos as their number of frames."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        url = part.get("image_url", {}).get("url", "")
        if "video" in part:
            video = part["video"]
            parts.append("(a video file)" if isinstance(video, str) else f"(a video of {len(video)} frames)")
        else:
            parts.append(f"![image]({url.partition(',')[0]})" if url else part["text"])
    return "\n\n".join(parts)
