"""``weft eval``: accuracy of a server, of a model run here, or of the reference implementation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from weft.common import log
from weft.common.errors import ConfigError
from weft.eval.gsm_mini import Problem, extract_answer, test_set
from weft.eval.ocr_mini import Line, is_right, ocr_test_set
from weft.eval.tools_mini import tool_test_set
from weft.eval.tools_score import Dialogue, totals
from weft.launch import options


@click.group("eval")
def evaluate() -> None:
    """Measure the accuracy of a server or a model."""


def measured(function: Callable[..., int]) -> Callable[..., int]:
    """Adds the options that every evaluation has: what to measure, how many problems, where to write."""
    for add in reversed(_OPTIONS):
        function = add(function)
    return function


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("model_name", metavar="[MODEL]", required=False),
    click.option(
        "--url",
        help="Measure the server with this base URL, e.g. http://127.0.0.1:8000/v1; "
        "MODEL is its model's name.",
    ),
    click.option(
        "--reference",
        is_flag=True,
        help="Measure the transformers implementation of MODEL instead of Weft's.",
    ),
    click.option(
        "--limit", type=click.IntRange(1, 100_000), default=500, show_default=True, help="Problems to ask."
    ),
    click.option(
        "--json",
        "json_file",
        type=click.Path(dir_okay=False),
        help="Write every answer and the total to this file.",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 4096),
        default=32,
        show_default=True,
        help="Requests (or rows) at once.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Tokens of one answer at most; what the context leaves by default.",
    ),
    click.option("--api-key", metavar="KEY", help="API key of the server at --url."),
    options.settings(options.ENGINE, ("chat_template", "log_level")),
)


def check(url: str | None, reference: bool, json_file: str | None, api_key: str | None) -> None:
    """Raises ConfigError for options that do not go together."""
    if url and reference:
        raise ConfigError("--url and --reference are two different things to measure: give one")
    if api_key and not url:
        raise ConfigError("--api-key goes with --url")
    if json_file is not None and not Path(json_file).absolute().parent.is_dir():
        raise ConfigError("--json must name a file in a folder that exists")


@evaluate.command("gsm-mini", cls=options.Command, short_help="Arithmetic word problems, exact answers.")
@measured
def gsm_mini(
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
    """Ask arithmetic word problems that the bundled model never saw, and count exact answers (greedy)."""
    check(url, reference, json_file, api_key)
    from weft.launch import answers

    problems = test_set(limit)
    questions = [problem.question for problem in problems]
    drafts: dict[str, list[int]] = {}
    started = time.monotonic()
    if url:
        name = model_name or given.get("model")
        target, texts = answers.from_server(url, name, questions, concurrency, max_tokens, api_key)
    else:
        config = options.build(given, model_name)
        log.configure(config.front.log_level)
        if reference:
            target, texts = answers.from_reference(config, questions, concurrency, max_tokens)
        else:
            target, texts = answers.from_engine(config, questions, concurrency, max_tokens, drafts)
    report = score(problems, texts, target, time.monotonic() - started)
    if sum(drafts.get("proposed", ())):
        report["drafts"] = drafts
    if json_file is not None:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    click.echo(
        f"gsm-mini: {report['exact']} / {report['total']} exact ({report['accuracy']:.1%}), "
        f"{report['seconds']} s"
    )
    if "drafts" in report:
        click.echo(f"drafts accepted, by place in a step: {acceptance(drafts)}")
    return 0


@evaluate.command("tools-mini", cls=options.Command, short_help="Calls of a calculator, and their answers.")
@measured
def tools_mini(
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
    """Ask questions that offer tools, run what is called, and count right calls and answers (greedy).

    Names of tools, sentences and pairs of numbers are none that the bundled model saw. With --url, chat
    completions with tools are used.
    """
    check(url, reference, json_file, api_key)
    from weft.launch import tool_answers

    dialogues = [Dialogue(problem) for problem in tool_test_set(limit)]
    started = time.monotonic()
    if url:
        name = model_name or given.get("model")
        target = tool_answers.from_server(url, name, dialogues, concurrency, max_tokens, api_key)
    else:
        config = options.build(given, model_name)
        log.configure(config.front.log_level)
        ask = tool_answers.from_reference if reference else tool_answers.from_engine
        target = ask(config, dialogues, concurrency, max_tokens)
    report = tool_report(dialogues, target, time.monotonic() - started)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    total = report["total"]
    click.echo(
        f"tools-mini: {report['calls']} / {total} right calls ({report['calls'] / total:.1%}), "
        f"{report['answers']} / {total} right answers ({report['answers'] / total:.1%}), "
        f"{report['seconds']} s"
    )
    return 0


@evaluate.command("ocr-mini", cls=options.Command, short_help="Lines drawn into images, read exactly.")
@measured
def ocr_mini(
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
    """Ask what is written in small images, 4 to 8 digits and capitals, and count exact answers (greedy).

    With --url, chat completions with images as data: URLs are used.
    """
    check(url, reference, json_file, api_key)
    if not url and not reference:
        raise ConfigError("ocr-mini asks a server or the reference: give --url or --reference")
    from weft.launch import image_answers

    lines = ocr_test_set(limit)
    started = time.monotonic()
    if url:
        name = model_name or given.get("model")
        target, texts = image_answers.from_server(url, name, lines, concurrency, max_tokens, api_key)
    else:
        config = options.build(given, model_name)
        log.configure(config.front.log_level)
        target, texts = image_answers.from_reference(config, lines, max_tokens)
    report = line_report(lines, texts, target, time.monotonic() - started)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    click.echo(
        f"ocr-mini: {report['exact']} / {report['total']} exact ({report['accuracy']:.1%}), "
        f"{report['seconds']} s"
    )
    return 0


def line_report(lines: Sequence[Line], texts: Sequence[str], target: str, seconds: float) -> dict[str, Any]:
    """The report: totals first, then every line with what was answered."""
    rows = [
        {"prompt": line.prompt, "expected": line.text, "text": text, "right": is_right(text, line)}
        for line, text in zip(lines, texts, strict=True)
    ]
    exact = sum(row["right"] is True for row in rows)
    head = {"task": "ocr-mini", "target": target, "exact": exact, "total": len(rows)}
    return {**head, "accuracy": exact / len(rows), "seconds": round(seconds, 1), "problems": rows}


def tool_report(dialogues: Sequence[Dialogue], target: str, seconds: float) -> dict[str, Any]:
    """The report: totals first, then every problem with the calls that were made and the answer."""
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
    head = {"task": "tools-mini", "target": target, **totals(dialogues), "seconds": round(seconds, 1)}
    return {**head, "problems": rows}


def acceptance(drafts: dict[str, list[int]]) -> str:
    """``1,204 of 1,210 (99.5%), ...`` of each place."""
    pairs = zip(drafts["accepted"], drafts["proposed"], strict=True)
    return ", ".join(f"{a:,} of {p:,} ({a / p:.1%})" for a, p in pairs if p)


def score(problems: Sequence[Problem], texts: Sequence[str], target: str, seconds: float) -> dict[str, Any]:
    """The report: totals first, then every problem with what was answered."""
    rows = [
        {"question": p.question, "expected": p.answer, "answer": extract_answer(text), "text": text}
        for p, text in zip(problems, texts, strict=True)
    ]
    exact = sum(row["answer"] == row["expected"] for row in rows)
    return {
        "task": "gsm-mini",
        "target": target,
        "exact": exact,
        "total": len(rows),
        "accuracy": exact / len(rows),
        "seconds": round(seconds, 1),
        "problems": rows,
    }
