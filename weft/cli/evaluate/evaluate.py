"""``weft eval``: accuracy of a server, of a model in this process, or of transformers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import click

from weft.cli import options
from weft.cli.result_file import check_result_file, json_option, write_json
from weft.common import log
from weft.common.errors import ConfigError
from weft.config.sections.all import Config
from weft.eval.gsm_mini import Problem, extract_answer, test_set
from weft.eval.ocr_mini import Line, is_right, ocr_test_set
from weft.eval.tools_mini import tool_test_set
from weft.eval.tools_score import Dialogue, totals


@click.group("eval")
def evaluate() -> None:
    """Measure the accuracy of a server or a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Checked parameters of an evaluation."""

    url: str | None
    """URL of a server; None to run the model of ``config`` locally."""
    name: str | None
    """Name of the server's model; None for the first listed model."""
    api_key: str | None
    reference: bool
    """True to run the model in ``transformers``."""
    config: Config
    limit: int
    concurrency: int
    max_tokens: int | None

    @property
    def where(self) -> tuple[int, int | None, str | None]:
        """Parameters of requests to a server: concurrency, maximum tokens and API key."""
        return self.concurrency, self.max_tokens, self.api_key


Report: TypeAlias = dict[str, Any]
"""Totals first; ``problems`` has every problem with the answer."""


Measure: TypeAlias = Callable[[Evaluation], tuple[Report, list[str]]]
"""Function from the parameters to the report, and lines for the terminal."""


def measured(function: Measure, model: str | None = None) -> Callable[..., int]:
    """Return a command with the options of every evaluation. The command prints and writes the result of
    ``function``.

    ``model``: default model, if different from the default of other commands.
    """

    @functools.wraps(function)
    def command(
        model_name: str | None,
        url: str | None,
        reference: bool,
        limit: int,
        json_file: str | None,
        concurrency: int,
        max_tokens: int | None,
        api_key: str | None,
        **given: Any,
    ) -> int:
        check(url, reference, json_file, api_key)
        name = model_name or given.get("model")
        if not (name or given.get("config")):
            model_name = model
        config = Config() if url else options.build(given, model_name)
        if not url:
            log.configure(config.front.log_level)
        started = time.monotonic()
        report, lines = function(
            Evaluation(
                url=url,
                name=name,
                api_key=api_key,
                reference=reference,
                config=config,
                limit=limit,
                concurrency=concurrency,
                max_tokens=max_tokens,
            )
        )
        # Move the long list of problems to the end of the file.
        problems = report.pop("problems")
        report = {**report, "seconds": round(time.monotonic() - started, 1), "problems": problems}
        first, *more = lines
        click.echo(f"{report['task']}: {first}, {report['seconds']} s")
        for line in more:
            click.echo(line)
        write_json(json_file, report)
        return 0

    return _add_options(command)


_add_options = options.joined(
    click.argument("model_name", metavar="[MODEL]", required=False),
    click.option(
        "--url",
        help="Measure the server with this base URL, e.g. http://127.0.0.1:8000/v1. MODEL is then the "
        "name of the server's model.",
    ),
    click.option(
        "--reference",
        is_flag=True,
        help="Measure the transformers implementation of MODEL.",
    ),
    click.option(
        "--limit", type=click.IntRange(1, 100_000), default=500, show_default=True, help="Number of problems."
    ),
    json_option("Write every answer and the total to this file."),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 4096),
        default=32,
        show_default=True,
        help="Number of concurrent requests (or rows of a batch).",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Maximum tokens per answer. Default: the rest of the context.",
    ),
    click.option("--api-key", metavar="KEY", help="API key of the server at --url."),
    options.settings(options.ENGINE, ("chat_template", "log_level")),
)


def check(url: str | None, reference: bool, json_file: str | None, api_key: str | None) -> None:
    """Raise ConfigError for options that exclude each other."""
    if url and reference:
        raise ConfigError(
            "--url measures a running server and --reference measures transformers: give only one of them"
        )
    if api_key and not url:
        raise ConfigError("--api-key requires --url")
    check_result_file(json_file)


@evaluate.command("gsm-mini", cls=options.Command, short_help="Arithmetic word problems, exact answers.")
@measured
def gsm_mini(asked: Evaluation) -> tuple[Report, list[str]]:
    """Ask arithmetic word problems that the bundled model never saw, and count exact answers (greedy)."""
    from weft.cli.evaluate import text_answers

    problems = test_set(asked.limit)
    chats = [text_answers.chat_of(problem.question) for problem in problems]
    drafts: dict[str, list[int]] = {}
    if asked.url:
        target, texts = text_answers.from_server(asked.url, asked.name, chats, *asked.where)
    elif asked.reference:
        questions = [problem.question for problem in problems]
        target, texts = text_answers.from_reference(
            asked.config, questions, asked.concurrency, asked.max_tokens
        )
    else:
        target, texts = text_answers.from_engine(
            asked.config, chats, asked.concurrency, asked.max_tokens, drafts=drafts
        )
    report = score(problems, texts, target)
    lines = [exact_of(report)]
    if sum(drafts.get("proposed", ())):
        report["drafts"] = drafts
        lines.append(f"drafts accepted, by position in the step: {acceptance(drafts)}")
    return report, lines


@evaluate.command("tools-mini", cls=options.Command, short_help="Calls of a calculator, and their answers.")
@measured
def tools_mini(asked: Evaluation) -> tuple[Report, list[str]]:
    """Ask questions that offer tools, run the called tools, and count right calls and answers (greedy).

    The bundled model never saw the tool names, sentences and pairs of numbers. With --url, chat completions
    with tools are used.
    """
    from weft.cli.evaluate import tool_answers

    dialogues = [Dialogue(problem) for problem in tool_test_set(asked.limit)]
    if asked.url:
        target = tool_answers.from_server(asked.url, asked.name, dialogues, *asked.where)
    else:
        ask = tool_answers.from_reference if asked.reference else tool_answers.from_engine
        target = ask(asked.config, dialogues, asked.concurrency, asked.max_tokens)
    report = tool_report(dialogues, target)
    total = report["total"]
    return report, [
        f"{report['calls']} / {total} right calls ({report['calls'] / total:.1%}), "
        f"{report['answers']} / {total} right answers ({report['answers'] / total:.1%})"
    ]


@evaluate.command("ocr-mini", cls=options.Command, short_help="Lines drawn into images, read exactly.")
@functools.partial(measured, model="spool-vision")
def ocr_mini(asked: Evaluation) -> tuple[Report, list[str]]:
    """Ask for the text in small images, 4 to 8 digits and capitals, and count exact answers (greedy).

    With --url, chat completions with images as data: URLs are used.
    """
    from weft.cli.evaluate import image_answers, text_answers

    lines = ocr_test_set(asked.limit)
    if asked.reference:
        target, texts = image_answers.from_reference(asked.config, lines, asked.max_tokens)
    else:
        chats = image_answers.chats_of(lines)
        if asked.url:
            target, texts = text_answers.from_server(
                asked.url, asked.name, chats, *asked.where, title="ocr-mini"
            )
        else:
            target, texts = text_answers.from_engine(asked.config, chats, asked.concurrency, asked.max_tokens)
    report = line_report(lines, texts, target)
    return report, [exact_of(report)]


def line_report(lines: Sequence[Line], texts: Sequence[str], target: str) -> Report:
    """Return the report of ocr-mini: totals, and a row per line."""
    rows = [
        {"prompt": line.prompt, "expected": line.text, "text": text, "right": is_right(text, line)}
        for line, text in zip(lines, texts, strict=True)
    ]
    return _exact("ocr-mini", target, rows, sum(row["right"] is True for row in rows))


def tool_report(dialogues: Sequence[Dialogue], target: str) -> Report:
    """Return the report of tools-mini: totals, and every problem with the calls of the model."""
    rows = [
        {
            "question": one.problem.question,
            "tools": one.declarations,
            "expected_calls": [[call.name, call.arguments] for call in one.problem.calls],
            "calls": one.made,
            "calls_right": one.calls_right,
            "expected": one.problem.answer,
            "answer_right": one.answer_right,
            "text": one.text,
        }
        for one in dialogues
    ]
    return {"task": "tools-mini", "target": target, **totals(dialogues), "problems": rows}


def acceptance(drafts: dict[str, list[int]]) -> str:
    """Return the accepted drafts per position in a step: ``1,204 of 1,210 (99.5%), ...``."""
    pairs = zip(drafts["accepted"], drafts["proposed"], strict=True)
    return ", ".join(f"{a:,} of {p:,} ({a / p:.1%})" for a, p in pairs if p)


def score(problems: Sequence[Problem], texts: Sequence[str], target: str) -> Report:
    """Return the report of gsm-mini: totals, and a row per problem."""
    rows = [
        {"question": p.question, "expected": p.answer, "answer": extract_answer(text), "text": text}
        for p, text in zip(problems, texts, strict=True)
    ]
    return _exact("gsm-mini", target, rows, sum(row["answer"] == row["expected"] for row in rows))


def exact_of(report: Report) -> str:
    """Return the exact answers as text: ``466 / 500 exact (93.2%)``."""
    return f"{report['exact']} / {report['total']} exact ({report['accuracy']:.1%})"


def _exact(task: str, target: str, rows: list[Any], exact: int) -> Report:
    """Return a report with ``exact`` right answers out of ``rows``."""
    totals = {"exact": exact, "total": len(rows), "accuracy": exact / len(rows)}
    return {"task": task, "target": target, **totals, "problems": rows}
