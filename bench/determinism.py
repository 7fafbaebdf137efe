"""Measure the cost of --deterministic: throughput with and without, on the C++ operations and on torch's.

    python -m bench.determinism --model spool-text --requests 32 --prompt 512 --tokens 128 --json cost.json

Every variant is a process of its own. The variants take turns (A B C D, A B C D, ...). The output has
medians. If the engine of a variant is invariant without the switch, the output says so: the switch costs
nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: (name, the settings beyond the common ones, whether the C++ operations are used)
VARIANTS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("C++, default", {}, True),
    ("C++, --deterministic", {"deterministic": True}, True),
    ("torch, default", {}, False),
    ("torch, --deterministic", {"deterministic": True}, False),
)


def measure(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a model and run once in this process.

    Return output and prompt tokens per second, and the engine's determinism guarantee.
    """
    from weft import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=args.requests,
        enable_prefix_caching=False,
        **settings,
    )
    vocabulary = llm.config.spec.vocab_size

    def seconds(shift: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * i + 3 * j + shift) % vocabulary for j in range(args.prompt)]}
            for i in range(args.requests)
        ]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    seconds(0, 4)  # warms up
    prefill, whole = seconds(1, 1), seconds(2, args.tokens)
    made = {
        "output_tok_s": args.requests * args.tokens / whole,
        "prompt_tok_s": args.requests * args.prompt / prefill,
        "deterministic": llm.deterministic,
    }
    llm.shutdown()
    return made


def in_child(argv: list[str], number: int, cpp: bool) -> dict[str, Any]:
    environment = {**os.environ, **({} if cpp else {"WEFT_DISABLE_CPU_OPS": "1"})}
    command = [sys.executable, "-m", "bench.determinism", *argv, "--child", str(number)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{VARIANTS[number][0]} failed:\n{ran.stderr[-2000:]}")
    made: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-text", help="bundled name, folder or hub name")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32, help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens of each")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=3, help="times that each variant runs")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    parser.add_argument("--json", metavar="FILE", help="write every sample to this file")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args, VARIANTS[args.child][1])))
        return
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in VARIANTS}
    for _ in range(args.rounds):
        for number, (name, _, cpp) in enumerate(VARIANTS):
            samples[name].append(in_child(sys.argv[1:], number, cpp))
    for name, made in samples.items():
        output, prompt = (
            statistics.median(one[key] for one in made) for key in ("output_tok_s", "prompt_tok_s")
        )
        promise = "deterministic: " + ("yes" if made[0]["deterministic"] else "no")
        print(f"{name:24} {output:8.0f} output tok/s {prompt:8.0f} prompt tok/s   {promise}")
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
