"""The command that a ready server prints works when pasted into a shell."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.common import env
from weft.config import hub
from weft.config.about import EXAMPLE_IMAGE, about
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.sections.front_section import FrontSection
from weft.front import first_request
from weft.media.decode import can_decode

PLAIN = FrontSection()


def pasted(server: Running, **variables: str | None) -> dict[str, Any]:
    """Run the command that ``server`` printed. Return the answer."""
    line = next(line for line in server.output if line.startswith("try: "))
    ran = subprocess.run(
        ["sh", "-c", line.removeprefix("try: ").replace("curl ", "curl -sS --fail-with-body ", 1)],
        capture_output=True,
        text=True,
        timeout=deadline(30),
        env=env.child_environment(**variables),
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def said(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def changed(target: Path, *, template: bool, head: bool) -> Path:
    """Copy the bundled text model to ``target`` without its chat template or without its output head."""
    shutil.copytree(hub.bundled_models()["spool-text"], target)
    if not template:
        (target / "chat_template.jinja").unlink()
    if not head:
        from safetensors.torch import load_file, save_file

        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        tensors = load_file(target / "model.safetensors")
        save_file({n.removeprefix("model."): t for n, t in tensors.items()}, target / "model.safetensors")
    return target


def test_a_chat_can_be_pasted(weft_server: Any) -> None:
    assert "19" in said(pasted(weft_server))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [("spool-mla", "19"), ("spool-vision", "HYJ6P3"), ("no template", ""), ("no head", None)],
)
def test_what_the_model_can_do_is_asked(
    start_weft: Any, tmp_path: Path, model: str, expected: str | None
) -> None:
    """A chat, an image, a continued text, an embedding: each answers 200 and is not empty."""
    if model.startswith("no "):
        kept = {"template": model != "no template", "head": model != "no head"}
        model = str(changed(tmp_path / "it's", **kept))
    answer = pasted(start_weft("--model", model))
    if expected is None:
        assert len(answer["data"][0]["embedding"]) > 10
    else:
        assert said(answer)
        assert expected in said(answer)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["one", "one,two", " one  two"])
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_key_of_the_environment_is_named_and_not_shown(servers: Servers, keys: str, fronts: str) -> None:
    server = servers.weft("--threads", "1", "--fronts", fronts, WEFT_API_KEY=keys)
    assert not any("one" in line for line in server.output)
    if not keys.startswith(" "):
        assert said(pasted(server, WEFT_API_KEY=keys))


def _request(**keywords: Any) -> tuple[str, dict[str, Any]]:
    """(route, body) for a model with a chat template."""
    config = resolve(from_keywords(keywords))
    command = first_request.command("http://here", config, PLAIN, chats=True)
    words = shlex.split(command)
    return words[1].removeprefix("http://here"), json.loads(words[words.index("-d") + 1])


def test_an_image_model_is_shown_an_image() -> None:
    route, body = _request(model="spool-vision")
    parts = body["messages"][0]["content"]
    assert route == "/v1/chat/completions"
    assert [part["type"] for part in parts] == (["image_url", "text"] if can_decode() else [])
    assert EXAMPLE_IMAGE.is_file()


@pytest.mark.parametrize("without", [{"language_model_only": True}, {"limit_mm_per_prompt": 0}])
def test_a_model_whose_images_are_refused_is_asked_in_text(without: dict[str, Any]) -> None:
    _, body = _request(model="spool-vision", **without)
    assert isinstance(body["messages"][0]["content"], str)


@pytest.mark.parametrize(
    ("held", "given", "header"),
    [
        (None, (), ""),
        ("one", ("one",), '-H "Authorization: Bearer $WEFT_API_KEY"'),
        ("one,two", ("one", "two"), '-H "Authorization: Bearer ${WEFT_API_KEY%%[, ]*}"'),
        (None, ("one",), "<a key of --api-key"),
        ("other", ("one",), "<a key of --api-key"),
        ("", ("one",), "<a key of --api-key"),
    ],
)
def test_the_header_names_where_the_key_is(
    monkeypatch: pytest.MonkeyPatch, held: str | None, given: tuple[str, ...], header: str
) -> None:
    """A variable that is unset or holds another key is never named."""
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    if held is not None:
        monkeypatch.setenv("WEFT_API_KEY", held)
    config = resolve(from_keywords({}))
    section = msgspec.structs.replace(PLAIN, api_key=given)
    command = first_request.command("http://here", config, section, chats=True)
    assert header in command
    assert ("Authorization" in command) == bool(given)
    assert "Bearer one" not in command


def test_a_name_with_a_quote_can_be_pasted() -> None:
    config = resolve(from_keywords({"served_model_name": "a'b"}))
    command = first_request.command("http://here", config, PLAIN, chats=False)
    words = shlex.split(command)
    assert words[1] == "http://here/v1/completions"
    assert json.loads(words[-1])["model"] == "a'b"


def test_every_bundled_model_has_a_description_that_all_show(weft_server: Any) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "weft", "models"], capture_output=True, text=True, check=True
    ).stdout
    for folder in hub.bundled_models().values():
        known = about(folder)
        assert known.does in shown
        assert known.does
        assert known.question
        assert not known.image or (Path(folder) / known.image).is_file()
    (card,) = weft_server.http.get("/v1/models").json()["data"]
    known = about(hub.bundled_models()["spool-text"])
    assert (card["about"], card["example"]) == (known.does, known.question)
    assert card["input_modalities"] == ["text"]
    assert card["implementation"] == "weft"
    # The time of the files, which every API server of the model gives, also after a restart.
    files = Path(hub.bundled_models()["spool-text"])
    newest = max(file.stat().st_mtime for file in (files / "config.json", *files.glob("*.safetensors")))
    assert card["created"] == int(newest)
    assert about("/no/such/model").does == ""
