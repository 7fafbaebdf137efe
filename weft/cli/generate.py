"""``weft generate``: answers on the terminal, printed as they grow."""

from __future__ import annotations

import asyncio
import os.path
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weft.cli import options
from weft.common import log
from weft.common.errors import ConfigError
from weft.common.folder import expanded
from weft.common.spelling import misspelt
from weft.config import hub
from weft.config.flags import SETTINGS
from weft.config.sections.all import Config
from weft.text.model import TextModel
from weft.types.sampling import SamplingParams

if TYPE_CHECKING:
    from weft import AsyncLLM

F = TypeVar("F", bound=Callable[..., Any])

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

#: Field of SamplingParams, its type on a command line, and its help. --seed belongs to the engine.
_SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "Maximum tokens to generate. Default: the rest of the context."),
    ("min_tokens", int, "Minimum tokens to generate."),
    ("temperature", float, "Sampling temperature. 0 (the default): greedy."),
    ("top_k", int, "Keep the k most likely tokens."),
    ("top_p", float, "Keep the most likely tokens up to this total probability."),
    ("min_p", float, "Drop tokens below this share of the highest probability."),
    ("frequency_penalty", float, "Penalty for each earlier occurrence of a token in the answer."),
    ("presence_penalty", float, "Penalty for tokens that occur in the answer."),
    ("repetition_penalty", float, "Divisor for the logits of tokens that occur in the prompt or the answer."),
    ("n", int, "Number of answers per prompt."),
)


def sampling_flags(function: F) -> F:
    """Add the flags of sampling parameters to a command, and return the command."""
    function = click.option(
        "--stop", multiple=True, help="Stop string, which ends the answer; may be repeated."
    )(function)
    function = click.option("--ignore-eos", is_flag=True, help="Continue after the end-of-text token.")(
        function
    )
    for name, kind, text in reversed(_SAMPLING):
        function = click.option(f"--{name.replace('_', '-')}", type=kind, help=text)(function)
    return function


@click.command(cls=options.Command)
@click.argument("words", metavar="[MODEL] [PROMPT]...", nargs=-1)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Apply the chat template. Default: if the model has a chat template.",
)
@sampling_flags
@options.settings(options.ENGINE, ("chat_template", "log_level"))
def generate(words: tuple[str, ...], chat: bool | None, **given: Any) -> int:
    """Answer each PROMPT (or standard input, with - or in a pipe).

    The first word is the MODEL if the word is a bundled model, a folder or a hub name (owner/name), and
    --model is not given. A PROMPT of the same form needs a MODEL in front, or --model.
    """
    model, prompts = split_words(words, given.get("model"))
    sampling = {name: given.pop(name) for name, _, _ in _SAMPLING}
    params = SamplingParams(
        stop=given.pop("stop"),
        ignore_eos=given.pop("ignore_eos"),
        **{"temperature": 0.0, **{name: value for name, value in sampling.items() if value is not None}},
    )
    config = options.build(given, model)
    log.configure(config.front.log_level)
    if prompts in ([], ["-"]):
        prompts = [_read_prompt(model, asked=prompts == ["-"])]
    try:
        "".join(prompts).encode()
    except UnicodeEncodeError:
        raise ConfigError("the PROMPT is not UTF-8 text") from None
    return asyncio.run(_answer(config, prompts, params, chat))


def _read_prompt(model: str | None, asked: bool) -> str:
    """Return the prompt on standard input. Raise ConfigError if there is none.

    ``model``: the word taken as MODEL, for the error message. ``asked``: True if the user gave ``-``.
    """
    missing, ask = "there is no PROMPT", "give a PROMPT, or - to read one from standard input"
    if asked or not sys.stdin.isatty():
        try:
            prompt = sys.stdin.read().rstrip("\n")
            prompt.encode()  # in the C locale Python reads wrong bytes as surrogates
        except UnicodeError:
            raise ConfigError("standard input is not UTF-8 text") from None
        if prompt.strip():
            return prompt
        missing, ask = "standard input is empty", "give a PROMPT"
    if model is None:
        raise ConfigError(f"{missing}: {ask}")
    word = shlex.quote(model)
    message = f"{missing}, because {model!r} was read as the MODEL: run `weft generate {word} PROMPT`"
    if not is_here(model):
        default = shlex.quote(SETTINGS["model"].default)
        message += f", or, if the word is the PROMPT, `weft generate --model {default} {word}`"
    raise ConfigError(message)


async def _answer(config: Config, prompts: Sequence[str], params: SamplingParams, chat: bool | None) -> int:
    """Run all prompts at once and print the answers in order.

    The first unfinished answer is printed as it grows. Return the exit status: 1 if a sequence failed. The
    engine is ended afterwards.
    """
    from weft import AsyncLLM

    llm = AsyncLLM(**options.keywords(config))
    if chat is None:
        chat = TextModel.load(llm.config.tokenizer_path, config.front.chat_template).chat.source is not None
    several = len(prompts) * params.n > 1
    printed = [GeneratedAnswer(several) for _ in prompts]
    streams: list[asyncio.Task[int]] = []
    try:
        streams += [
            asyncio.create_task(_follow(llm, chat_prompt(prompt) if chat else prompt, params, answer))
            for prompt, answer in zip(prompts, printed, strict=True)
        ]
        status = 0
        for number, (stream, answer) in enumerate(zip(streams, printed, strict=True), 1):
            answer.show(f"--- {number}: {prompts[number - 1][:60]!r}" if several else None)
            status = max(status, await stream)
        return status
    finally:
        # Without a cancellation the tasks would fail with the engine, and the errors would never be
        # retrieved.
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await asyncio.to_thread(llm.shutdown)


def chat_prompt(prompt: str) -> dict[str, Any]:
    """Return a conversation with one message."""
    return {"messages": [{"role": "user", "content": prompt}]}


async def _follow(llm: AsyncLLM, prompt: Any, params: SamplingParams, answer: GeneratedAnswer) -> int:
    """Pass a request's output to ``answer``.

    Return the status: 1 if a sequence failed, else 0. Errors of sequences are printed to standard error.
    """
    status = 0
    async for output in llm.generate(prompt, params):
        answer.update([one.text for one in output.outputs], output.finished)
        for one in output.outputs:
            if output.finished and one.error is not None:
                click.echo(f"weft: {one.error.message}", err=True)
                status = 1
    return status


class GeneratedAnswer:
    """Printed answer to one prompt: nothing until ``show``, then all text so far, then each new piece.

    Answers to several prompts, and several samples (n > 1), are printed when complete.
    """

    def __init__(self, whole: bool) -> None:
        """``whole``: True to print when complete, False to print each piece."""
        self._whole = whole
        self._title: str | None = None
        self._texts: list[str] = []
        self._finished = False
        self._shown = False
        self._printed = 0

    def show(self, title: str | None) -> None:
        """Print the answer below ``title``, now and after each update."""
        self._shown = True
        self._title = title
        self._print()

    def update(self, texts: list[str], finished: bool) -> None:
        """Set all text so far, one text per choice."""
        self._texts = texts
        self._finished = finished
        if self._shown:
            self._print()

    def _print(self) -> None:
        """Print the whole answer once finished, or the new text of the first choice.

        Printed text is not printed again.
        """
        if self._whole and self._finished:
            click.echo(self._title)
            for text in self._texts:
                click.echo(_visible(text))
        elif not self._whole and self._texts:
            click.echo(_visible(self._texts[0][self._printed :]), nl=self._finished)
            self._printed = len(self._texts[0])


def _visible(text: str) -> str:
    """Return ``text`` without control characters if standard output is a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


def split_words(words: Sequence[str], model: str | None) -> tuple[str | None, list[str]]:
    """Return (MODEL or None, prompts) from the positional words. ``model``: value of --model.

    Raise ConfigError if the first word is nearly the name of a bundled model.
    """
    if model is None and words:
        if is_model(words[0]):
            return words[0], list(words[1:])
        if near := misspelt(words[0], hub.bundled_models()):
            raise ConfigError(
                f"{words[0]!r} is not a model. Did you mean {near!r}? To use {words[0]!r} as a prompt, give "
                "a MODEL in front",
                param="model",
            )
    return None, list(words)


def is_model(word: str) -> bool:
    """Return True if a word has the form of a model name, not of a prompt."""
    return is_here(word) or _HUB_NAME.fullmatch(word) is not None


def is_here(word: str) -> bool:
    """Return True if a word names a bundled model or a model folder."""
    if word in hub.bundled_models():
        return True
    return os.path.isfile(expanded(word) / "config.json")
