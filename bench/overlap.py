"""Measure the gain of micro-batches: off, prefill, all and auto, on ranks with delayed links.

python -m bench.overlap --json bench/results/overlap.json --markdown bench/results/overlap.md

Ranks are CPU processes of this machine over gloo. Each collective ends ``--delays`` milliseconds late
(WEFT_LINK_DELAY_MS), so that there is time to hide. Each delay has one group. Rounds over modes and
concurrencies are interleaved: the engine decides on micro-batches, so all modes share the group. ``auto``
keeps its state from round to round. Ratios compare with ``off`` of the same round; the output has medians
over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.load import engine, request
from bench.machine import commit, describe
from weft.engine.core import EngineCore
from weft.overlap.overlap_policy import OverlapPolicy

MODES = ("off", "prefill", "all", "auto")
#: A config.json of a model with steps of tens of milliseconds on a CPU core.
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 2048,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 2048,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10_000.0,
}


@dataclass
class Run:
    """Hold the figures of one mode in one round."""

    seconds: float
    tokens: int
    """Output tokens."""
    steps: int
    overlapped: int
    communication: float
    hidden: float


def run(core: EngineCore, policy: OverlapPolicy, size: int, args: argparse.Namespace, base: int) -> Run:
    """Run ``size`` concurrent requests to their end. Return the figures. Raise RuntimeError if a request
    fails.
    """
    core.overlap = policy
    rng, vocabulary, before = random.Random(base), core.config.spec.vocab_size, core.stats()
    made = [request(base + n, args.prompt_tokens, args.tokens, vocabulary, rng) for n in range(size)]
    began, tokens = time.perf_counter(), 0
    for one in made:
        core.submit(one)
    while core.has_work():
        for event in core.step():
            if event.error is not None:
                raise RuntimeError(event.error.message)
            tokens += len(event.token_ids)
    seconds, after = time.perf_counter() - began, core.stats()
    return Run(seconds, tokens, after.steps - before.steps, policy.steps, policy.communication, policy.hidden)


def of_one_delay(core: EngineCore, args: argparse.Namespace) -> dict[int, dict[str, list[Run]]]:
    """Return concurrency -> mode -> one run per round."""
    found: dict[int, dict[str, list[Run]]] = {size: {mode: [] for mode in MODES} for size in args.concurrency}
    learnt, base = {size: OverlapPolicy("auto") for size in args.concurrency}, 0
    for turn in range(args.rounds + args.warm):
        for size in args.concurrency:
            # Rotate the order of modes, so that no mode always runs first.
            modes = MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]
            for mode in modes:
                policy = learnt[size] if mode == "auto" else OverlapPolicy(mode)
                policy.steps, policy.communication, policy.hidden = 0, 0.0, 0.0
                made = run(core, policy, size, args, base)
                base += size
                if turn >= args.warm:
                    found[size][mode].append(made)
    return found


def median(values: list[float]) -> float:
    return statistics.median(values)


def lines(delay: float, found: dict[int, dict[str, list[Run]]]) -> list[str]:
    """Return the rows of the table."""
    made = []
    for size, by_mode in found.items():
        off = by_mode["off"]
        for mode, runs in by_mode.items():
            ratios = [base.seconds / one.seconds for base, one in zip(off, runs, strict=True)]
            link = sum(one.communication for one in runs)
            hidden = sum(one.hidden for one in runs) / link if link else 0.0
            waits = median([one.communication - one.hidden for one in runs])
            made.append(
                f"| {delay:g} | {size} | {mode} | {median([one.tokens / one.seconds for one in runs]):.1f} "
                f"| {median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}) "
                f"| {median([one.overlapped for one in runs]):.0f} "
                f"of {median([one.steps for one in runs]):.0f} "
                f"| {median([one.communication for one in runs]):.2f} | {waits:.2f} | {hidden:.0%} |"
            )
    return made


HEADER = [
    "| delay ms | requests | overlap | output tokens/s | times off, by round (range) "
    "| steps in micro-batches | communication s | waited s | hidden |",
    "|---:|---:|---|---:|---|---:|---:|---:|---:|",
]


def folder_of(shape: str, root: Path) -> str:
    """Write a model folder of ``shape``, for random weights, and return the path."""
    folder = root / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    return str(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="dense")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 5.0], help="milliseconds")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="uncounted rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    facts = {
        "machine": describe(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(Path(__file__).parent),
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }
    table, results = [*HEADER], {}
    with tempfile.TemporaryDirectory() as root:
        model = folder_of(args.shape, Path(root))
        for delay in args.delays:
            os.environ["WEFT_LINK_DELAY_MS"] = str(delay)
            core = engine(
                model,
                1,
                load_format="dummy",
                dtype="float32",
                device="cpu",
                kv_cache_memory=256 << 20,
                max_model_len=1024,
                max_num_seqs=max(args.concurrency),
                max_num_batched_tokens=512,
                tensor_parallel_size=args.ranks,
                enable_expert_parallel=args.shape == "moe",
                rank_timeout=120.0,
            )
            try:
                found = of_one_delay(core, args)
            finally:
                core.close()
            table += lines(delay, found)
            print(
                "\n".join(table if delay == args.delays[0] else table[-len(found) * len(MODES) :]), flush=True
            )
            results[str(delay)] = {
                size: {mode: [asdict(one) for one in runs] for mode, runs in by_mode.items()}
                for size, by_mode in found.items()
            }
    facts["load_after"] = list(os.getloadavg())
    if args.json:
        args.json.write_text(json.dumps({**facts, "runs": results}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(page(args, facts, table))


def page(args: argparse.Namespace, facts: dict[str, Any], table: list[str]) -> str:
    """Return the result page: the table, the machine and the conditions."""
    machine = facts["machine"]
    load = ", ".join(f"{value:.1f}" for value in (machine["load_average"][0], facts["load_after"][0]))
    return "\n".join(
        [
            f"# Overlap, {args.shape}, {args.ranks} ranks",
            "",
            f"`python -m bench.overlap --shape {args.shape} --ranks {args.ranks} --rounds {args.rounds} "
            f"--warm {args.warm} --concurrency {' '.join(map(str, args.concurrency))}`, {facts['date']}, "
            f"commit {facts['commit']}.",
            "",
            f"{machine['cpu']['model']}, {machine['cores']} cores, {machine['system']}; load average "
            f"before and after: {load}. {args.ranks} processes of one thread each; float32, random weights; "
            f"{args.prompt_tokens} + {args.tokens} tokens a request, all requests at once.",
            "",
            *table,
            "",
        ]
    )


if __name__ == "__main__":
    main()
