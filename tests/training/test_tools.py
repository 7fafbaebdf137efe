"""Rows with tools match the chat template, and contain nothing of the test split."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from training.loop import Run
from training.rows import Encoder
from training.spool_text import SpoolText, TextRecipe
from training.tokenizer import CHAT_TEMPLATE, SYSTEM_PROMPTS, TOOL_TEMPLATE
from training.tools import offer, prompt_of, turn
from weft.config.hub import bundled_models
from weft.eval.gsm_story import Rng
from weft.eval.tools_mini import tool_problems, tool_test_set
from weft.eval.tools_score import Dialogue
from weft.text.template import ChatTemplate

START = bundled_models()["spool-text"]
CALL = {"name": "add", "arguments": {"b": 7, "a": 12}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    known = PreTrainedTokenizerFast.from_pretrained(START)
    known.chat_template = TOOL_TEMPLATE
    return known


def render(source: str, messages: list[Any], **variables: Any) -> str:
    return ChatTemplate(source).render({"messages": messages, **variables})


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.grid)])
def test_rows_are_what_the_template_writes(tokenizer: PreTrainedTokenizerFast, count: int) -> None:
    for problem in tool_test_set(count):
        dialogue = Dialogue(problem)
        for call in problem.calls:
            dialogue.take("", [(call.name, call.arguments)])
        pieces = [(offer(problem), 0.0), *turn(problem, 0.1)]
        prompt = "".join(text for text, _ in pieces[:-1])
        messages = dialogue.messages
        asked = {"tools": dialogue.declarations, "add_generation_prompt": True}
        assert render(TOOL_TEMPLATE, messages, **asked) == prompt
        assert tokenizer.apply_chat_template(messages, tokenize=False, **asked) == prompt
        ids = [i for text, _ in pieces[:-1] for i in tokenizer.encode(text, add_special_tokens=False)]
        assert prompt_of(tokenizer, dialogue) == ids
        system = [{"role": "system", "content": SYSTEM_PROMPTS[0]}]
        assert render(TOOL_TEMPLATE, system + messages, **asked).startswith(offer(problem, SYSTEM_PROMPTS[0]))


def test_without_tools_the_template_writes_what_it_wrote_before() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}
    answer = {"role": "assistant", "content": "#### 3"}
    for messages in ([user], [system, user], [user, answer, user], [system, user, answer]):
        for prompt in (True, False):
            before = render(CHAT_TEMPLATE, messages, add_generation_prompt=prompt)
            for tools in ({}, {"tools": None}, {"tools": []}):
                assert render(TOOL_TEMPLATE, messages, add_generation_prompt=prompt, **tools) == before


def test_the_template_takes_what_clients_send() -> None:
    """Arguments as text or as an object, several calls at once, text beside a call, tools of any form."""
    call_text = '<tool_call>\n{"name": "add", "arguments": {"b": 7, "a": 12}}\n</tool_call>'
    as_text = {"function": {"name": "add", "arguments": '{"b": 7, "a": 12}'}, "type": "function", "id": "x"}
    user = {"role": "user", "content": "12 and 7?"}
    for calls in ([as_text], [CALL]):
        for content in ("", None):
            spoken = {"role": "assistant", "content": content, "tool_calls": calls}
            made = render(TOOL_TEMPLATE, [user, spoken])
            assert made.endswith(f"<|im_start|>assistant\n{call_text}<|im_end|>\n")
    spoken = {"role": "assistant", "content": "I add.", "tool_calls": [as_text, CALL]}
    results = [{"role": "tool", "content": "19"}, {"role": "tool", "content": "20"}]
    made = render(TOOL_TEMPLATE, [user, spoken, *results], add_generation_prompt=True)
    assert made.endswith(
        f"<|im_start|>assistant\nI add.\n{call_text}\n{call_text}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n19\n</tool_response>\n"
        "<tool_response>\n20\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    bare: dict[str, Any] = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    odd = {
        "name": "odd",
        "parameters": {"properties": {"a": {"anyOf": []}, "b": True, 'c"': {"type": "array"}}},
    }
    made = render(TOOL_TEMPLATE, [user], tools=[bare, {"function": {"name": "none"}}, {"function": odd}])
    shown = made.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    assert shown == [
        '{"name": "now", "arguments": {}}',
        '{"name": "none", "arguments": {}}',
        '{"name": "odd", "arguments": {"a": "any", "b": "any", "c\\"": "array"}}',
    ]


def test_the_loss_of_a_row_is_on_calls_and_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, 0.1, 0.4)
    rng, draws, source = random.Random(1), Rng("draws"), tool_problems("train", 3)
    turns = set()
    for _ in range(100):
        row = encoder.tools(source, rng, draws)
        assert len(row.ids) == len(row.weights) < 2048
        assert set(row.weights) == {0.0, 0.1, 1.0}
        counted = tokenizer.decode([i for i, w in zip(row.ids, row.weights, strict=True) if w == 1.0])
        parts = counted.removesuffix("<|im_end|>").split("<|im_end|>")
        assert all(part.startswith("<tool_call>\n{") or "#### " in part for part in parts)
        whole = tokenizer.decode(row.ids)
        assert tokenizer.encode(whole, add_special_tokens=False) == row.ids
        turns.add(counted.count("####"))
    assert turns == {1, 2, 3}


def test_a_run_starts_from_a_checkpoint(tmp_path: Path) -> None:
    script = SpoolText()
    script.start_from(Path(START), tmp_path)
    run = Run(tmp_path, script, TextRecipe(start=START))
    assert run.step == 0
    known = script.weights(Path(START))
    assert all((known[name] == tensor).all() for name, tensor in run.model.state_dict().items())
    assert run.tokenizer.get_vocab() == PreTrainedTokenizerFast.from_pretrained(START).get_vocab()
    script.export(run.model, run.tokenizer, tmp_path / "made")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (Path(START) / name).read_bytes(), name
    assert (tmp_path / "made/chat_template.jinja").read_text() == TOOL_TEMPLATE


@pytest.mark.slow
def test_without_a_share_of_tools_rows_are_those_of_before(tokenizer: PreTrainedTokenizerFast) -> None:
    from training.rows import batches
    from weft.eval.gsm_mini import problems

    ids, weights = next(batches(Encoder(tokenizer, 0.1), 1, 0, 4096))
    assert ids.shape == weights.shape
    rng, source = random.Random("1 0"), problems("train", 1_000_000)
    plain = Encoder(tokenizer, 0.1)
    rows = {tuple(plain.encode(source, rng).ids) for _ in range(3000)}
    shown = [tuple(itertools.dropwhile(lambda i: i == 0, reversed(row.tolist())))[::-1] for row in ids]
    ends = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert all(row in rows or (*row, ends) in rows for row in shown)
