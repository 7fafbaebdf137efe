"""Answers to tools-mini from a server, from a local engine, or from transformers.

Decoding is greedy. The called tools run in this process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from weft.cli.evaluate.text_answers import call, http_client, in_turns, message_of, served_model
from weft.common.client_tls import versioned_url
from weft.common.progress import progress_bar
from weft.config import hub
from weft.config.sections.all import Config
from weft.eval.tools_score import Dialogue, Made, read_calls

Reply = Callable[[list[list[int]]], list[str]]
"""Function from prompts of token ids to greedy texts."""


def from_server(
    url: str,
    model: str | None,
    dialogues: Sequence[Dialogue],
    concurrency: int,
    max_tokens: int | None,
    key: str | None,
) -> str:
    """Lead every dialogue to an answer by chat completions with ``tools``. Return the model's name.

    A server without a parser for calls leaves calls in the text, and calls in the text count too. Raise the
    errors of ``text_answers.from_server``.
    """
    return asyncio.run(_ask(versioned_url(url), model, dialogues, concurrency, max_tokens, key))


async def _ask(
    base: str,
    model: str | None,
    dialogues: Sequence[Dialogue],
    concurrency: int,
    max_tokens: int | None,
    key: str | None,
) -> str:
    """Lead all dialogues to an answer, ``concurrency`` at a time.

    The dialogues receive the texts and calls. Return the model's name. Raises the errors of ``call``.
    """
    async with http_client(base, key, concurrency) as client:
        name = model or await served_model(client, base)
        with progress_bar(total=len(dialogues), title="tools-mini", unit="problem") as bar:

            async def one(dialogue: Dialogue) -> None:
                # Each turn either calls tools or gives the final text.
                while dialogue.text is None:
                    body = {"model": name, "temperature": 0, "messages": dialogue.messages}
                    body["tools"] = dialogue.declarations
                    if max_tokens is not None:
                        body["max_tokens"] = max_tokens
                    answer = await call(client, "POST", f"{base}/chat/completions", body)
                    dialogue.take(*read_message(message_of(answer)))
                bar.update()

            await in_turns(one, dialogues, concurrency)
    return name


def read_message(message: dict[str, Any]) -> tuple[str, list[Made]]:
    """Return (text, calls) of a chat completion's message.

    Without parsed calls, calls are parsed from the text. Arguments that are no JSON stay text.
    """
    text = str(message.get("content") or "")
    made: list[Made] = []
    for entry in message.get("tool_calls") or ():
        function = entry["function"]
        try:
            made.append((str(function["name"]), json.loads(function["arguments"])))
        except (ValueError, TypeError):
            # Arguments that are no JSON count as a wrong call, not as an error.
            made.append((str(function["name"]), function["arguments"]))
    return text, made or read_calls(text)


def lead(
    dialogues: Sequence[Dialogue], prompt: Callable[[Dialogue], list[int]], reply: Reply, concurrency: int
) -> None:
    """Lead dialogues to an answer round by round, ``concurrency`` at a time.

    ``prompt`` makes the ids of a dialogue, ``reply`` the texts of a batch. The dialogues receive the texts
    and calls.
    """
    with progress_bar(total=len(dialogues), title="tools-mini", unit="problem") as bar:
        for begin in range(0, len(dialogues), concurrency):
            part = dialogues[begin : begin + concurrency]
            # Each round answers all open dialogues of the part in one batch.
            while waiting := [one for one in part if one.text is None]:
                texts = reply([prompt(one) for one in waiting])
                for one, text in zip(waiting, texts, strict=True):
                    one.take(text, read_calls(text))
            bar.update(len(part))


def from_engine(
    config: Config, dialogues: Sequence[Dialogue], concurrency: int, max_tokens: int | None
) -> str:
    """Lead every dialogue to an answer by an engine in this process, ended afterwards.

    Return the model's name.
    """
    from weft import LLM, SamplingParams
    from weft.cli.options import keywords

    settings = {**keywords(config), "max_num_seqs": min(concurrency, config.scheduler.max_num_seqs)}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(**settings) as llm:

        def reply(prompts: list[list[int]]) -> list[str]:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return [output.outputs[0].text for output in outputs]

        lead(dialogues, _prompts(config), reply, concurrency)
    return config.model.model


def _prompts(config: Config) -> Callable[[Dialogue], list[int]]:
    """Return a function from a dialogue to token ids, by the model's chat template.

    Reads the tokenizer; raises ConfigError.
    """
    from weft.text.model import TextModel
    from weft.text.parsing.parser import Tool

    model = config.model
    path = hub.resolve_model_path(model.tokenizer or model.model, None if model.tokenizer else model.revision)
    chat = TextModel.load(path, config.front.chat_template).chat

    def prompt(dialogue: Dialogue) -> list[int]:
        shown = [declared["function"] for declared in dialogue.declarations]
        return chat.encode(dialogue.messages, tools=[Tool(**function) for function in shown]).ids

    return prompt


def from_reference(
    config: Config, dialogues: Sequence[Dialogue], concurrency: int, max_tokens: int | None
) -> str:
    """Lead every dialogue to an answer by ``transformers`` in this process. Return the model's name."""
    from weft.cli.reference import Reference

    reference = Reference(config)

    def prompt(dialogue: Dialogue) -> list[int]:
        return reference.prompt(dialogue.messages, dialogue.declarations)

    def reply(prompts: list[list[int]]) -> list[str]:
        return reference.texts(prompts, max_tokens)

    lead(dialogues, prompt, reply, concurrency)
    return f"{config.model.model} (transformers)"
