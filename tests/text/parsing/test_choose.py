"""The declaration of a model is chosen by flags, by its template or by its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.text_folders import write_tokenizer
from tests.text.parsing.test_response_template import template
from weft.common.errors import ConfigError
from weft.text.model import TextModel
from weft.text.parsing.choose_parser import ModelHints, choose
from weft.text.parsing.events import Content, Reasoning
from weft.text.parsing.output import ModelOutput
from weft.text.parsing.parser import OutputSpec

TEMPLATES = {
    "<tool_call>\n{{ x }}</tool_call>": "hermes",
    "<tool_call>\n<function={{ x }}>\n<parameter=": "qwen3_coder",
    "<tool_call>{{ x }}\n<arg_key>": "glm45",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>x\n```json\n": "deepseek_v3",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>": "deepseek_v31",
    "<｜DSML｜function_calls>": "deepseek_v32",
    "<｜DSML｜tool_calls>": "deepseek_v4",
    "<|tool_calls_section_begin|><|tool_call_begin|>": "kimi_k2",
    "[TOOL_CALLS][ARGS]": "mistral",
    "<|start|>assistant<|channel|>final<|message|>": "gpt_oss",
    "<|python_tag|>": "llama3_json",
    "[func_name1(params_name1=params_value1": "pythonic",
    "<|python_start|>{{ x }}<|python_end|>": "llama4",
    "<|tool_call>call:{{ name }}{": "gemma4",
    "<start_function_call>call:": "functiongemma",
    "<TOOLCALL>[": "nemotron_json",
    "<|tool|>{{ tool }}<|/tool|>": "phi4_mini_json",
    "<|tool_call|>[": "granite",
    "<function_calls>": "olmo3",
    "<|tool_call:begin|>": "solar_open",
    "<｜tool_calls_begin｜>": "step3",
    "<tool_call>f<tool_sep>\n<arg_key>": "hy_v3",
    "<tool_calls>[": "apriel",
    'Action:\n```json\n[\n{"tool_name"': "command_r",
}


@pytest.mark.requirement("G4")
@pytest.mark.parametrize("source", TEMPLATES)
def test_calls_by_the_template(source: str) -> None:
    declared = choose("auto", "none", ModelHints(template=source))
    assert declared is not None
    assert declared.name == TEMPLATES[source]
    assert declared.tells_calls
    assert not declared.tells_reasoning
    assert choose("none", "none", ModelHints(template=source)) is None


def test_reasoning_by_template_or_tokens() -> None:
    for hints, name in (
        (ModelHints(template="<think>\n"), "qwen3"),
        (ModelHints(added=frozenset({"<think>", "</think>"})), "qwen3"),
        (ModelHints(template="content.split('</think>')[-1]"), "deepseek_r1"),
        (ModelHints(added=frozenset({"[THINK]", "[/THINK]"})), "mistral"),
        (ModelHints(template="<|channel|>analysis<|message|>"), "gpt_oss"),
        (ModelHints(template="<|channel>thought\n"), "gemma4"),
        (ModelHints(template="text.split('<channel|>'); '<|channel>' in part"), "gemma4"),
        (ModelHints(added=frozenset({"<|channel>", "<channel|>"})), "gemma4"),
        (ModelHints(template="<think></think><response>"), "granite"),
        (ModelHints(template="Here is my thought process:"), "granite"),
        (ModelHints(template="<think></think><answer>"), "hunyuan_a13b"),
        (ModelHints(template="<|think|>x<|end|><|content|>"), "solar_open"),
        (ModelHints(template="<think:opensource>"), "hy_v3"),
    ):
        declared = choose("none", "auto", hints)
        assert declared is not None
        assert declared.name == name
        assert declared.tells_reasoning
        assert not declared.tells_calls
    assert choose("auto", "auto", ModelHints(template="{{ messages }}")) is None


@pytest.mark.requirement("G1")
def test_two_flags_make_one_declaration() -> None:
    declared = choose("hermes", "qwen3", ModelHints())
    assert declared is not None
    assert declared.reasoning
    assert declared.calls
    assert declared.name == "qwen3+hermes"


def test_wrong_flags_are_named() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of auto, none, apertus"):
        choose("herms", "auto", ModelHints())
    with pytest.raises(ConfigError, match="--reasoning-parser must be one of"):
        choose("auto", "hermes", ModelHints())
    with pytest.raises(ConfigError, match="cannot be combined"):
        choose("pythonic", "mistral", ModelHints())


def test_mistral_is_written_as_its_template_does() -> None:
    newer = choose("mistral", "none", ModelHints(template="[TOOL_CALLS]x[ARGS]"))
    older = choose("auto", "none", ModelHints(template="[TOOL_CALLS] [{"))
    assert newer is not None
    assert older is not None
    assert newer.calls == older.calls[::-1]
    assert newer.calls[0].section is None


@pytest.mark.parametrize(
    ("template", "opens", "closes"),
    [
        (
            "<think:opensource> <tool_calls:opensource> <tool_sep:opensource>",
            "<think:opensource>",
            "</think:opensource>",
        ),
        ("Here is my thought process:", "Here is my thought process:", "Here is my response:"),
        ("<think> <tool_sep>", "<think>", "</think>"),
    ],
)
def test_the_spelling_of_the_template_goes_first(template: str, opens: str, closes: str) -> None:
    """A reasoning block that the prompt opens ends with its own mark, also where the server writes the
    mark."""
    declared = choose("auto", "auto", ModelHints(template=template))
    output = ModelOutput(declared, {})
    assert output.reasoning_end == closes + "\n\n"
    spec = OutputSpec(reasoning=True, in_reasoning=output.in_reasoning("prompt" + opens, ""))
    parser = output.parser(spec)
    events = [*parser.feed(f"Hm.{closes}\nRain."), *parser.close()]
    assert events == [Reasoning("Hm."), Content("Rain.")]
    if declared is not None and declared.calls:
        assert declared.calls[0].triggers[0].endswith("opensource>") == ("opensource" in template)


def test_brackets_of_a_template_change_no_spelling() -> None:
    declared = choose("hermes", "none", ModelHints(template="{{ messages[0] }}"))
    assert declared is not None
    assert declared.calls[0].triggers == ("<tool_call>",)


def test_a_response_template_goes_first() -> None:
    hints = ModelHints(template="<tool_call>", response_template=template("deepseek_v31"))
    declared = choose("auto", "auto", hints)
    assert declared is not None
    assert declared.name == "response_template"
    named = choose("hermes", "auto", hints)
    assert named is not None
    assert named.name == "response_template+hermes"
    unreadable = choose("auto", "auto", ModelHints(template="<tool_call>", response_template={"fields": 1}))
    assert unreadable is not None
    assert unreadable.name == "hermes"


def test_a_folder_says_it_all(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, added=("<think>", "</think>"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["response_template"] = template("hermes")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    output = TextModel.load(tmp_path).output
    assert output.declared is not None
    assert output.declared.name == "response_template"
    assert TextModel.load(tmp_path, None, "none", "none").output.declared is None
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        TextModel.load(tmp_path, None, "nothing")
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs cannot set messages"):
        TextModel.load(tmp_path, default_chat_template_kwargs={"messages": []})
