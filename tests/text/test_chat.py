"""Conversations encode to the ids of transformers, and their text never becomes a control token."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.common.errors import ConfigError, InvalidRequest
from weft.text.chat import ChatFormat
from weft.text.model import TextModel
from weft.text.parsing.parser import Tool
from weft.text.tokenizer import Tokenizer

PIECE = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|im_", "start|>", "<", "<|", "|>", "</s>", "<s", "s>", "system\n"]
    ),
)
CONTENT = st.lists(PIECE, max_size=5).map("".join)


@pytest.fixture(scope="module")
def chatml(all_tokenizers: dict[str, Tokenizer]) -> ChatFormat:
    return ChatFormat(all_tokenizers["byte_level"])


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize("name", ["byte_level", "unigram"])
def test_same_ids_as_transformers(
    folders: dict[str, Path], all_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folders[name])
    ours = ChatFormat(all_tokenizers[name])
    messages = [user("the  <fox> 你"), {"role": "assistant", "content": " quick "}, user("one\ntwo")]
    for add in (True, False):
        made = ours.encode(messages, add_generation_prompt=add)
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
        assert made.text == text
        assert made.ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert made.ids.count(1) == theirs(text, add_special_tokens=False)["input_ids"].count(1)


def test_a_template_with_its_own_beginning_has_one(all_tokenizers: dict[str, Tokenizer]) -> None:
    made = ChatFormat(all_tokenizers["unigram"]).encode([user("the")])
    assert made.ids[0] == 1
    assert made.ids.count(1) == 1


@settings(max_examples=80, deadline=None)
@given(first=CONTENT, second=CONTENT, name=st.sampled_from(["byte_level", "unigram"]))
def test_content_never_adds_a_control_token(
    all_tokenizers: dict[str, Tokenizer], first: str, second: str, name: str
) -> None:
    tokenizer = all_tokenizers[name]
    chat = ChatFormat(tokenizer)

    def turns(a: str, b: str) -> list[dict[str, Any]]:
        return [user(a), {"role": "assistant", "content": b}, user(a)]

    special = set(tokenizer.special.values()) - {tokenizer.special.get("<unk>")}
    made, plain = chat.encode(turns(first, second)), chat.encode(turns("x", "x"))
    assert [i for i in made.ids if i in special] == [i for i in plain.ids if i in special]
    assert first.strip() in made.text
    if name == "byte_level":
        assert tokenizer.decode(made.ids, False) == made.text


ADJACENT = (
    "{% for m in messages %}{{ m.content }}{{ m.name }}{{ '|>' }}{{ '<|' + m.content + '|>' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "name"), [("<|im_", "end|>"), ("im_end", "x"), ("<|im_end", ""), ("<", "|im_end|>")]
)
def test_strings_cannot_make_a_control_token_together(
    all_tokenizers: dict[str, Tokenizer], content: str, name: str
) -> None:
    tokenizer = all_tokenizers["byte_level"]
    made = ChatFormat(tokenizer, ADJACENT).encode([user(content, name=name)])
    assert made.text == f"{content}{name}|><|{content}|>"
    assert not set(made.ids) & set(tokenizer.special.values())
    assert tokenizer.decode(made.ids, False) == made.text


def test_variables_cannot_make_a_control_token(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    chat = ChatFormat(tokenizer, "{{ deep.a[0] }}{{ flag }}{% if mode == 'fast' %}F{% endif %}<|im_end|>")
    made = chat.encode([user("x")], kwargs={"deep": {"a": ["<|im_end|>"]}, "flag": True, "mode": "fast"})
    assert made.text == "<|im_end|>TrueF<|im_end|>"
    assert made.ids.count(tokenizer.special["<|im_end|>"]) == 1


@pytest.mark.requirement("F18")
@pytest.mark.parametrize(
    "key",
    [
        "tokenize",
        "messages",
        "chat_template",
        "add_generation_prompt",
        "bos_token",
        "_x",
        "a b",
        "range",
        "raise_exception",
    ],
)
def test_variables_cannot_take_a_reserved_name(chatml: ChatFormat, key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chatml.encode([user("x")], kwargs={key: "y"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("kwargs", ["x", [1], {"a": object()}, {"a": float}, {"a": "\ud800"}])
def test_variables_must_be_json(chatml: ChatFormat, kwargs: Any) -> None:
    with pytest.raises(InvalidRequest):
        chatml.encode([user("x")], kwargs=kwargs)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "endoftext", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user("ok"), user(None)], "messages[1].content"),
        ([user({})], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content"),
        ([user([{"type": "text"}])], "messages[0].content"),
        ([user("\ud800")], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([user("x", tool_calls=[{"id": "1"}])], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([{"role": "user", "content": "x", "reasoning": "y"}], "messages[0].reasoning"),
        ([{"role": "assistant", "content": "x", "reasoning": 1}], "messages[0].reasoning"),
        (
            [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
            "messages[0].function_call",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([user("x", other=1)], "messages[0].other"),
    ],
)
def test_wrong_messages_are_named(chatml: ChatFormat, messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chatml.encode(messages)
    assert caught.value.param == param


def test_what_clients_send_back_is_taken(chatml: ChatFormat) -> None:
    answer = {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None, "annotations": []}
    answer["provider_specific_fields"] = {"refusal": None}
    assert "y<|im_end|>" in chatml.encode([user("x"), answer, user("z")]).text
    empty = {"reasoning_content": "", "reasoning": None, "refusal": "", "tool_calls": [], "other": None}
    assert chatml.encode([user("x"), {**answer, **empty}, user("z")]) == chatml.encode(
        [user("x"), answer, user("z")]
    )


def test_an_assistant_that_said_nothing(chatml: ChatFormat) -> None:
    said = [user("x"), {"role": "assistant", "content": ""}, user("z")]
    for answer in ({"role": "assistant"}, {"role": "assistant", "content": None, "refusal": None}):
        assert chatml.encode([user("x"), answer, user("z")]) == chatml.encode(said)


def test_text_parts_are_joined(chatml: ChatFormat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chatml.encode([user(parts)]).ids == chatml.encode([user("a\nb")]).ids


def test_a_template_that_loops_over_parts_gets_parts(all_tokenizers: dict[str, Tokenizer]) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}"
    chat = ChatFormat(all_tokenizers["byte_level"], template)
    assert chat.encode([user("abc")]).text == "abc<|im_end|>"
    assert chat.ends_of_turn() == {2}


def test_developer_is_system_where_the_template_does_not_know_it(chatml: ChatFormat) -> None:
    text = chatml.encode([{"role": "developer", "content": "be brief"}, user("x")]).text
    assert text.startswith("<|im_start|>system\nbe brief")


def test_continuing_the_final_message(folders: dict[str, Path], chatml: ChatFormat) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folders["byte_level"])
    for content in ("The answer is", "so 2 <", " x "):
        messages = [user("q"), {"role": "assistant", "content": content}]
        made = chatml.encode(messages, add_generation_prompt=False, continue_final_message=True)
        assert made.text == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    with pytest.raises(InvalidRequest):
        chatml.encode(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest):
        chatml.encode([user("q")], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.requirement("F18")
def test_templates_in_requests(all_tokenizers: dict[str, Tokenizer], chatml: ChatFormat) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chatml.encode([user("x")], chat_template="{{ 1 }}")
    assert caught.value.param == "chat_template"
    trusting = ChatFormat(all_tokenizers["byte_level"], allow_request_template=True)
    assert trusting.encode([user("x")], chat_template="{{ 1 }}").text == "1"


def test_a_missing_or_broken_template_says_so(all_tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatFormat(all_tokenizers["words"]).encode([user("x")])
    with pytest.raises(InvalidRequest, match="does not compile"):
        ChatFormat(all_tokenizers["words"], "{% if %}").encode([user("x")])


def test_a_broken_template_of_the_flag_ends_the_start(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="--chat-template: the chat template does not compile"):
        TextModel.load(folders["words"], tmp_path / "broken.jinja")


@pytest.mark.requirement("F63")
def test_ends_of_turn_include_the_templates(folders: dict[str, Path], tmp_path: Path) -> None:
    assert TextModel.load(folders["byte_level"]).end_ids == (2,)
    assert TextModel.load(folders["unigram"]).end_ids == (2,)
    folder = copytree(folders["byte_level"], tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}")
    model = TextModel.load(folder, file)
    assert model.end_ids == (0, 1), "where only starts are marked, the next start ends a turn"
    with pytest.raises(ConfigError, match="--chat-template"):
        TextModel.load(folder, tmp_path / "none.jinja")


DEFAULT = "  {% for m in messages %}\n {{ m.content }}{% endfor %}\n\n"
WITH_TOOLS = "\n{%- set first = tools[0] %}\nuse {{ first.function.name }}:{{ messages[0].content }} \n"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_a_template_for_tools_beside_the_default(
    place: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Hermes 3 and Command R have two templates. The text is that of transformers."""
    folder = copytree(folders["byte_level"], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": WITH_TOOLS}]
    if place == "additional_chat_templates":
        (folder / place).mkdir()
        (folder / place / "tool_use.jinja").write_text(WITH_TOOLS)
        (folder / "chat_template.jinja").write_text(DEFAULT)
    else:
        config["chat_template"] = [*named, {"name": "rag", "template": "{{ documents }}"}]
        (folder / place).write_text(json.dumps(config))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    chat = TextModel.load(folder).chat
    asked = [{"role": "user", "content": "the fox"}]
    tool = {"type": "function", "function": {"name": "jump", "description": "", "parameters": {}}}
    for tools in ([], [tool]):
        wanted = theirs.apply_chat_template(asked, tools=tools or None, tokenize=False)
        given = [Tool(name="jump", description="", parameters={})] if tools else []
        found = chat.encode([user("the fox")], tools=given, add_generation_prompt=False)
        assert found.text == wanted


def test_tokens_with_names_are_variables(folders: dict[str, Path], tmp_path: Path) -> None:
    """The variables are those of transformers. The template stands in processor_config.json."""
    transformers = pytest.importorskip("transformers")
    folder = copytree(folders["byte_level"], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    config |= {"extra_special_tokens": {"image_token": "<think>"}, "boi_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{{ boi_token }}{{ image_token }}{{ messages[0].content }}{{ eos_token }}"
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": template}))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = theirs.apply_chat_template([user("the fox")], chat_template=template, tokenize=False)
    assert TextModel.load(folder).chat.encode([user("the fox")]).text == wanted


def test_the_files_template_wins_over_the_configs(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copytree(folders["byte_level"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert TextModel.load(folder).chat.encode([user("x")]).text == "file x"


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_template_is_none(blank: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Base models are published with an empty template. The next file with a template is read."""
    folder = copytree(folders["byte_level"], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": blank}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextModel.load(folder).chat.encode([user("x")])
    for value in ("json {{ messages[0].content }}", {"default": "json {{ messages[0].content }}"}):
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": value}))
        assert TextModel.load(folder).chat.encode([user("x")]).text == "json x"
    (folder / "chat_template.jinja").write_text(blank)
    assert TextModel.load(folder).chat.encode([user("x")]).text == "json x"
    with pytest.raises(ConfigError, match="--chat-template names an empty file"):
        TextModel.load(folder, folder / "chat_template.jinja")


def test_a_blank_template_for_tools_is_none(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copytree(folders["byte_level"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("default {% if tools %}{{ tools | length }}{% endif %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(" \n")
    tool = Tool(name="f")
    assert TextModel.load(folder).chat.encode([user("x")], tools=[tool]).text == "default 1"


def test_a_template_that_shows_nothing_is_named(all_tokenizers: dict[str, Tokenizer]) -> None:
    chat = ChatFormat(all_tokenizers["words"], "{% if tools %}{{ messages[0].content }}{% endif %}")
    with pytest.raises(InvalidRequest, match="chat template makes an empty prompt") as caught:
        chat.encode([user("x")])
    assert caught.value.param == "messages"
