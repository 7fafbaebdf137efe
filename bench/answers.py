"""Compare the answers of servers with roles with the answers of one group, 64 requests at a time.

    python -m bench.answers [--models spool-text,spool-mla] [--variants unified-x1,1p1d,1p2d] [--name NAME]
    python -m bench.answers --task ocr-mini --models spool-vision --variants unified-x1,1e1u,1e1p1d,2e1p1d

The problems are the problems of ``weft eval gsm-mini`` or the lines of ``weft eval ocr-mini``. Requests are
greedy, over HTTP. Two answers are equal when their texts are equal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import record
from bench.compare import BUNDLED
from bench.disaggregation import VARIANTS, serving
from bench.rounds import say
from weft.cli.evaluate import answers, image_answers
from weft.common.cores import usable_cores
from weft.eval import gsm_mini, ocr_mini

Ask = Callable[[str], list[str]]
"""The answers of the server at a URL."""
Score = Callable[[list[str]], int]
"""Returns the number of correct answers."""


def problems(limit: int, concurrency: int, tokens: int) -> tuple[int, Ask, Score]:
    """Return (number of problems, ask, score) for word problems."""
    asked = gsm_mini.test_set(limit)
    chats = [answers.chat_of(problem.question) for problem in asked]

    def ask(url: str) -> list[str]:
        return answers.from_server(url, None, chats, concurrency, tokens, None)[1]

    return len(asked), ask, lambda texts: gsm_mini.score(texts, asked)


def lines(limit: int, concurrency: int, tokens: int) -> tuple[int, Ask, Score]:
    """Images of lines: (how many, ask, score)."""
    shown = ocr_mini.ocr_test_set(limit)
    chats = image_answers.chats_of(shown)

    def ask(url: str) -> list[str]:
        return answers.from_server(url, None, chats, concurrency, tokens, None, title="ocr-mini")[1]

    def score(texts: list[str]) -> int:
        return sum(ocr_mini.is_right(text, line) for text, line in zip(texts, shown, strict=True))

    return len(shown), ask, score


TASKS = {"gsm-mini": problems, "ocr-mini": lines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="gsm-mini")
    parser.add_argument("--models", default="spool-text,spool-mla", help="bundled ones")
    parser.add_argument("--variants", default="unified-x1,1p1d,1p2d", help="all are compared with the first")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=200, help="problems")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    count, ask, score = TASKS[args.task](args.limit, args.concurrency, args.max_tokens)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            first: list[str] = []
            for name in args.variants.split(","):
                flags = VARIANTS[name].format(cores=usable_cores(), target=0)
                log = Path(folder) / f"{model}-{name}.log"
                with serving(flags, str(BUNDLED / model), args.dtype, 300.0, log) as server:
                    began = time.monotonic()
                    texts = ask(f"{server.url}/v1")
                    seconds = time.monotonic() - began
                first = first or texts
                same = sum(one == other for one, other in zip(texts, first, strict=True))
                rows.append(
                    {
                        "model": model,
                        "groups": name,
                        "problems": count,
                        "right": score(texts),
                        "the same text": same,
                        "seconds": round(seconds, 1),
                    }
                )
                say(str(rows[-1]))
    table = record.markdown(rows)
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        title = f"Answers of groups with roles beside one group's, {args.concurrency} at a time"
        record.write(path, "bench.answers", title, table, {"rows": rows})


if __name__ == "__main__":
    main()
