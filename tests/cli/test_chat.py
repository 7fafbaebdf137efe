"""Parts of ``weft chat``: messages of the server, input of the user, and the display."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from weft.cli.chat.chat_client import (
    AnswerPiece,
    CallPart,
    ChatError,
    End,
    Piece,
    ReasoningPiece,
    base_url,
    pieces_of,
    sse_data,
)
from weft.cli.chat.chat_command import Interrupts, chat, frame_urls, image_url, read_tools
from weft.cli.chat.chat_input import PlainLines
from weft.cli.chat.chat_session import (
    ChatCommand,
    ChatHistory,
    Nothing,
    Reply,
    Say,
    Unknown,
    read_input,
    unfinished,
)
from weft.cli.chat.chat_view import PlainView, RichView
from weft.common.errors import ConfigError


def event(delta: dict[str, Any], finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def cut(data: bytes, seed: int) -> list[bytes]:
    """``data`` in random pieces."""
    draw = random.Random(seed)
    found = []
    while data:
        size = draw.randint(1, 7)
        found.append(data[:size])
        data = data[size:]
    return found


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_are_read_whatever_their_pieces(end: str) -> None:
    lines = [": keep-alive", "", "data: one\u2028two", "", "event: x", "data:three", "data: four ä€😀", ""]
    lines += ["id: 1", "", "data: [DONE]", "", "data: behind the end", "", ""]
    data = end.join(lines).encode()
    for seed in range(50):
        assert list(sse_data(cut(data, seed))) == ["one\u2028two", "three\nfour ä€😀"]


def test_a_line_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.chat.chat_client.MAX_EVENT", 100)
    with pytest.raises(ChatError, match="too long"):
        list(sse_data([b"data: " + b"x" * 60] * 2))


def test_a_reply_has_reasoning_text_and_calls() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city": 1}'}}
    events = [
        event({"role": "assistant", "content": ""}),
        event({"reasoning_content": "hm", "reasoning": "hm"}),
        event({"content": "It is"}),
        event({"tool_calls": [call]}),
        event({"tool_calls": [more]}),
        event({}, "tool_calls"),
        json.dumps({"choices": [], "usage": {"completion_tokens": 7}}),
    ]
    found = list(pieces_of(iter(events)))
    assert found == [
        ReasoningPiece("hm"),
        AnswerPiece("It is"),
        CallPart(0, "c1", "weather", ""),
        CallPart(0, "", "", '{"city": 1}'),
        End("tool_calls", 7),
    ]
    reply = Reply()
    for piece in found:
        reply.take(piece)
    assert reply.message() == {
        "role": "assistant",
        "content": "It is",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": 1}'}}
        ],
    }


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            [event({"content": "a"}), '{"error": {"message": "the engine failed"}}'],
            "broke off: the engine failed",
        ),
        ([event({"content": "a"})], "closed the stream before its end"),
        (["{"], "not JSON"),
        (['{"choices": [1]}'], "OpenAI's format"),
        (["[" * 100_000], "not JSON"),
        ([event({"content": [{"type": "text", "text": "a"}]})], "OpenAI's format"),
        ([event({"tool_calls": [{"index": "1"}]})], "OpenAI's format"),
        ([event({"tool_calls": [{"index": 1 << 40}]})], "OpenAI's format"),
        ([event({"tool_calls": [{"index": -1}]})], "OpenAI's format"),
        ([event({"tool_calls": [{"function": {"name": ["f"]}}]})], "OpenAI's format"),
        (['{"choices": [{"delta": {}, "finish_reason": 5}]}'], "OpenAI's format"),
    ],
)
def test_a_reply_that_breaks_off_is_an_error(events: list[str], message: str) -> None:
    with pytest.raises(ChatError, match=message):
        list(pieces_of(iter(events)))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("localhost:8000/", "http://localhost:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/api/openai", "https://host/api/openai"),
        ("https://host/v1/chat/completions", "https://host/v1"),
    ],
)
def test_urls_as_users_write_them(given: str, url: str) -> None:
    assert base_url(given) == url


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("hello \n", Say("hello")),
        ("  \n", Nothing()),
        ("/reset", ChatCommand("/reset", "")),
        ("/system be  brief ", ChatCommand("/system", "be  brief")),
        ("/exit", ChatCommand("/quit", "")),
        ("/nope x", Unknown("/nope")),
        ("//etc/hosts?", Say("/etc/hosts?")),
        ('"""\na\n\n b\n"""\n', Say("a\n\n b")),
        ('"""one"""', Say("one")),
        ('""""""', Nothing()),
    ],
)
def test_meanings_of_input_lines(text: str, meaning: Any) -> None:
    assert read_input(text) == meaning


def test_three_quotes_take_lines_until_three_quotes() -> None:
    assert unfinished('"""')
    assert unfinished('"""a\n"')
    assert not unfinished('"""a\n"""')
    assert not unfinished('say """')
    lines = PlainLines(io.StringIO('one\n"""two\n/reset\n"""\nthree'))
    assert [lines.ask() for _ in range(4)] == ["one\n", '"""two\n/reset\n"""\n', "three", None]


def test_a_conversation_keeps_its_messages() -> None:
    talk = ChatHistory("m", "be brief", {"temperature": 0.0})
    talk.say("hi")
    assert talk.body() == {
        "temperature": 0.0,
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    }
    reply = Reply()
    reply.take(AnswerPiece("hel"))
    talk.add_reply(reply)  # stopped: the received text stays
    assert talk.messages[-1] == {"role": "assistant", "content": "hel"}
    talk.say("again")
    talk.add_reply(Reply())  # stopped before anything came: the message is taken back
    assert [one["content"] for one in talk.messages] == ["hi", "hel"]
    talk.say("x")
    called = Reply()
    for piece in (CallPart(0, "c", "f", "{}"), End("tool_calls", None)):
        called.take(piece)
    talk.add_reply(called)
    talk.answer_call(called.calls[0], "4")
    assert talk.messages[-1] == {"role": "tool", "tool_call_id": "c", "content": "4"}
    talk.take_back()
    assert [one["content"] for one in talk.messages] == ["hi", "hel"]
    assert "## User\n\nhi\n" in talk.as_markdown()
    assert json.loads(talk.as_json())["messages"][0]["role"] == "system"
    talk.reset()
    assert [one["role"] for one in talk.body()["messages"]] == ["system"]


def test_images_go_with_the_next_message() -> None:
    talk = ChatHistory("m", "", {})
    talk.images += ["data:image/png;base64,AAAA", "https://example.org/a.png"]
    talk.say("what is it?")
    talk.say("sure?")
    seen, again = talk.body()["messages"]
    assert [part["type"] for part in seen["content"]] == ["image_url", "image_url", "text"]
    assert seen["content"][0]["image_url"]["url"] == "data:image/png;base64,AAAA"
    assert again["content"] == "sure?"
    shown = talk.as_markdown()
    assert "![image](data:image/png;base64)" in shown
    assert "![image](https://example.org/a.png)" in shown
    assert "what is it?" in shown
    talk.images.append("https://example.org/b.png")
    talk.videos.append(["https://example.org/1.png", "https://example.org/2.png"])
    talk.reset()
    assert not talk.images
    assert not talk.videos


def test_videos_go_with_the_next_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (10, 11, 9):
        (tmp_path / f"frame {number:02}.png").write_bytes(b"%d" % number)
    frames = frame_urls(f"'{tmp_path}/frame *.png' https://example.org/a")
    wanted = [f"data:image/png;base64,{base64.b64encode(b'%d' % n).decode()}" for n in (9, 10, 11)]
    assert frames == [*wanted, "https://example.org/a"]
    with pytest.raises(ConfigError, match=r"does not have the extension of an image: .*\.mp4"):
        frame_urls("nothing*")
    for suffix, kind in (("mkv", "video/x-matroska"), ("M4V", "video/mp4")):
        (tmp_path / f"clip.{suffix}").write_bytes(b"film")
        with monkeypatch.context() as patch:
            patch.setattr("mimetypes.guess_type", lambda name: (None, None))
            assert frame_urls(f"'{tmp_path}/clip.{suffix}'") == [f"data:{kind};base64,ZmlsbQ=="]
    with pytest.raises(ConfigError, match="an opening quote without a closing quote"):
        frame_urls("'a.png")
    talk = ChatHistory("m", "", {})
    talk.videos.append(frames)
    talk.say("what is it?")
    (seen,) = talk.body()["messages"]
    assert seen["content"] == [{"type": "video", "video": frames}, {"type": "text", "text": "what is it?"}]
    assert not talk.videos
    assert "(a video of 4 frames)" in talk.as_markdown()
    (tmp_path / "clip.mp4").write_bytes(b"film")
    talk.videos.append(frame_urls(str(tmp_path / "clip.mp4")))
    talk.say("And this?")
    assert talk.messages[-1]["content"][0] == {"type": "video", "video": "data:video/mp4;base64,ZmlsbQ=="}
    assert "(a video file)" in talk.as_markdown()
    with pytest.raises(ConfigError, match="extension of an image"):
        frame_urls(f"{tmp_path}/clip.mp4 {tmp_path}/clip.mp4")


def test_an_image_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"picture")
    assert image_url(str(file)) == "data:image/png;base64,cGljdHVyZQ=="
    assert image_url("https://example.org/a") == "https://example.org/a"
    with pytest.raises(ConfigError, match="no such file"):
        image_url(str(tmp_path / "b.jpg"))
    with pytest.raises(ConfigError, match="does not have the extension of an image"):
        image_url(str(tmp_path))


def test_plain_replies_are_the_text_itself() -> None:
    out, err = io.StringIO(), io.StringIO()
    pieces: list[Piece] = [
        ReasoningPiece("let "),
        ReasoningPiece("me"),
        AnswerPiece("It *is*\x1b[2J"),
        AnswerPiece(" so."),
    ]
    pieces += [CallPart(0, "c", "f", '{"a": 1}'), End("length", 3)]
    PlainView(out, err).show(iter(pieces), Reply())
    assert out.getvalue() == '[thinks] let me\nIt *is*[2J so.\n[calls] f({"a": 1})\n'
    assert "--max-tokens" in err.getvalue()


def test_words_of_the_server_do_not_command_the_terminal() -> None:
    """Errors and names of models, too."""
    err = io.StringIO()
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True)
    for view in (PlainView(io.StringIO(), err), RichView(console)):
        view.problem("refused: \x1b]0;title\x07")
        view.note("* model\x1b[2J")
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in err.getvalue()
    assert "\x1b]" not in console.file.getvalue()
    assert "\x1b[2J" not in console.file.getvalue()


MARKDOWN = """# Title

Some **bold** text
over two lines.

* one
* two

1. first

   second part

```python
def f():

    return "x"
```

| a | b |
|---|---|
| 1 | 2 |

Done.
"""


def drawn(text: str, seed: int, width: int = 60) -> str:
    """Return the final display of a reply that arrived in random pieces."""
    console = Console(file=io.StringIO(), width=width, height=20)
    draw = random.Random(seed)
    pieces: list[Piece] = []
    while text:
        size = draw.randint(1, 9)
        pieces.append(AnswerPiece(text[:size]))
        text = text[size:]
    RichView(console).show(iter([*pieces, End("stop", None)]), Reply())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_markdown_is_drawn_the_same_whatever_its_pieces() -> None:
    whole = drawn(MARKDOWN, 0)
    for words in ("Title", "Some bold text over two lines.", " • one", ' return "x"', " 1 ", "Done."):
        assert words in whole
    assert all(drawn(MARKDOWN, seed) == whole for seed in range(1, 60))


def test_reasoning_are_dim_and_calls_stand_behind_the_reply() -> None:
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True, color_system="standard")
    pieces: list[Piece] = [
        ReasoningPiece("hm\nhm"),
        AnswerPiece("Yes."),
        CallPart(0, "c", "f", "{}"),
        End("tool_calls", 9),
    ]
    RichView(console).show(iter(pieces), Reply())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"\x1b\[2;3mhm", shown)
    assert shown.index("hm") < shown.index("Yes.") < shown.index("→ f({})") < shown.index("9 tokens")


def test_drawn_text_stays_when_a_reply_is_stopped() -> None:
    console = Console(file=io.StringIO(), width=60, height=20)

    def pieces() -> Any:
        yield AnswerPiece("first\n\nsecond")
        raise KeyboardInterrupt

    reply = Reply()
    with pytest.raises(KeyboardInterrupt):
        RichView(console).show(pieces(), reply)
    assert isinstance(console.file, io.StringIO)
    assert "first" in console.file.getvalue()
    assert "second" in console.file.getvalue()
    assert reply.end is None


def test_tools_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text('[{"name": "f"}, {"type": "function", "function": {"name": "g"}}]')
    assert [tool["function"]["name"] for tool in read_tools(str(path))] == ["f", "g"]
    for content, message in (("{", "not valid JSON"), ("{}", "list of tools"), ("[]", "list of tools")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_tools(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_tools(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://h/v1", "--url", "http://g"], "are the same setting"),
        (["spool-text", "--url", "http://g"], "starts a server, and --url names a running server"),
        (["http://h/v1", "--", "--tp", "2"], "require a MODEL"),
    ],
)
def test_contradictions_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(chat, arguments, standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    assert message in result.exception.message


def test_the_help_names_what_matters() -> None:
    with click.Context(chat) as context:
        text = chat.get_help(context)
    for word in ("[URL|MODEL]", "--system", "--api-key", "WEFT_CHAT_API_KEY", "--temperature"):
        assert word in text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finalizer_swallows_ends_the_reply_all_the_same() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def pieces() -> Iterator[str]:
        yield "one"
        Finalized()  # the object's KeyboardInterrupt is lost
        yield "two"

    taken: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        taken.extend(interrupts.watch(pieces()))
    assert taken == ["one"]
    assert signal.getsignal(signal.SIGINT) is before
