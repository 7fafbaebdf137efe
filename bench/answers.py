"""Problems answered by servers with roles and by one group, 64 at a time: the same answers (E26).

    python -m bench.answers [--models spool-text,spool-mla] [--variants unified-x1,1p1d,1p2d] [--name NAME]

The problems of ``weft eval gsm-mini``, greedy, over HTTP. An answer is the same where its text is.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench import record
from bench.compare import BUNDLED
from bench.disaggregation import VARIANTS, serving
from bench.rounds import say
from weft.common.cores import usable_cores
from weft.eval.gsm_mini import score, test_set
from weft.launch import answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="spool-text,spool-mla", help="bundled ones")
    parser.add_argument("--variants", default="unified-x1,1p1d,1p2d", help="all are compared with the first")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=200, help="problems")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    problems = test_set(args.limit)
    chats = [answers.chat_of(problem.question) for problem in problems]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            first: list[str] = []
            for name in args.variants.split(","):
                flags = VARIANTS[name].format(cores=usable_cores(), target=0)
                log = Path(folder) / f"{model}-{name}.log"
                with serving(flags, str(BUNDLED / model), args.dtype, 300.0, log) as server:
                    began = time.monotonic()
                    asked = chats, args.concurrency, args.max_tokens, None
                    _, texts = answers.from_server(f"{server.url}/v1", None, *asked)
                    seconds = time.monotonic() - began
                first = first or texts
                same = sum(one == other for one, other in zip(texts, first, strict=True))
                rows.append(
                    {
                        "model": model,
                        "groups": name,
                        "problems": len(problems),
                        "right": score(texts, problems),
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
