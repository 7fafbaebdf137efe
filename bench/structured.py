"""Measure the cost of a grammar: milliseconds per output token (TPOT) with and without a JSON schema.

python -m bench.structured --model spool-text --batches 1,32 --json structured.json

Each step mode (one or two steps in flight, with and without drafts) has an engine, all loaded at once. Rounds
with and without the schema are interleaved, so a slow machine slows both. The first rounds warm up. The TPOT
of a sequence is the time from its first to its last token divided by the number of tokens after the first.
The TPOT of a round is the median over sequences; the output is the median over rounds. Both kinds of outputs
have the same length: the schema is an endless list.

"mask" is the time per step for masks, on the stepping thread. On a CPU with one step in flight nothing
computes meanwhile, so masks lengthen the step. With two steps in flight the forward pass runs in another
thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record
from weft import LLM, SamplingParams
from weft.grammar import build
from weft.types.grammar import Grammar

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "name": {"type": "string", "maxLength": 24},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "price": {"type": "number"},
            "sold": {"type": "boolean"},
        },
        "required": ["id", "name", "tags", "price", "sold"],
        "additionalProperties": False,
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "1 step": {},
    "2 steps": {"steps_in_flight": 2},
    "1 step, drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "2 steps, drafts": {
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "steps_in_flight": 2,
    },
}


@dataclass
class Runs:
    """Rounds of one kind."""

    tpot: list[float] = field(default_factory=list)
    """Milliseconds, of each round."""
    masks: list[float] = field(default_factory=list)
    """Mask milliseconds per constrained step, of each round."""
    accepted: int = 0
    tokens: int = 0


class Engine:
    """Wrap an ``LLM`` and record the arrival times of its tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.llm = LLM(**settings)
        self.runs: dict[tuple[int, bool], Runs] = {}
        self._times: dict[int, list[tuple[float, int]]] = {}
        core: Any = self.llm._core
        step = core.step

        def timed() -> Any:
            events = step()
            now = time.perf_counter()
            for event in events:
                if event.token_ids:
                    self._times.setdefault(event.sequence, []).append((now, len(event.token_ids)))
            return events

        core.step = timed

    def round(self, batch: int, tokens: int, grammar: Grammar | None, number: int, *, count: bool) -> None:
        """Answer ``batch`` prompts at once. Record the figures if ``count``."""
        runs = self.runs.setdefault((batch, grammar is not None), Runs())
        params = [
            SamplingParams(temperature=0.8, seed=1000 * number + one, max_tokens=tokens, ignore_eos=True)
            for one in range(batch)
        ]
        before = self.llm.stats()
        self._times.clear()
        outputs = self.llm.generate(
            [f"List number {number}, part {one}: " for one in range(batch)],
            params,
            use_tqdm=False,
            grammar=grammar,
        )
        after = self.llm.stats()
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), "an output ended early"
        assert (after.constrained_steps > before.constrained_steps) == (grammar is not None)
        if not count:
            return
        each = []
        for times in self._times.values():
            (first, made), (last, _) = times[0], times[-1]
            each.append(1e3 * (last - first) / (tokens - made))
        runs.tpot.append(statistics.median(each))
        steps = after.constrained_steps - before.constrained_steps
        runs.masks.append(1e3 * (after.mask_seconds - before.mask_seconds) / max(steps, 1))
        runs.accepted += sum(output.outputs[0].num_accepted_drafts for output in outputs)
        runs.tokens += batch * tokens


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table."""
    batches = [int(one) for one in args.batches.split(",")]
    common: dict[str, Any] = {
        "model": args.model,
        "threads": args.threads,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(batches),
        "kv_cache_memory": args.kv_cache_memory,
        "enable_prefix_caching": False,
        "grammar_backend": args.backend,
    }
    common |= {"dtype": args.dtype} if args.dtype else {}
    grammar = build.json_schema(SCHEMA, compact=True)
    ways = {name: way for name, way in WAYS.items() if name in args.ways.split(";") or args.ways == "all"}
    engines = {name: Engine({**common, **way}) for name, way in ways.items()}
    try:
        for turn in range(args.warm + args.rounds):
            for batch in batches:
                for engine in engines.values():
                    # Alternate the order, so that a drift of the machine affects both alike.
                    kinds = [None, grammar] if turn % 2 else [grammar, None]
                    for kind in kinds:
                        engine.round(batch, args.tokens, kind, turn, count=turn >= args.warm)
        return [line(name, batch, engines[name]) for batch in batches for name in engines]
    finally:
        for engine in engines.values():
            engine.llm.shutdown()


def line(name: str, batch: int, engine: Engine) -> dict[str, Any]:
    """Return one row of the table."""
    free, bound = engine.runs[batch, False], engine.runs[batch, True]
    ratios = [one / other for one, other in zip(bound.tpot, free.tpot, strict=True)]
    return {
        "batch": batch,
        "steps in flight": name,
        "TPOT ms": round(statistics.median(free.tpot), 3),
        "with schema": round(statistics.median(bound.tpot), 3),
        "over": f"{100 * (statistics.median(ratios) - 1):+.1f}%",
        "mask ms a step": round(statistics.median(bound.masks), 3),
        "drafts accepted": round(free.accepted / free.tokens, 3),
        "with schema, accepted": round(bound.accepted / bound.tokens, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-text", help="bundled name, folder or hub name")
    parser.add_argument("--batches", default="1,32", help="sequences at once")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=7, help="times that each variant is counted")
    parser.add_argument("--warm", type=int, default=2, help="rounds before those")
    parser.add_argument("--ways", default="all", help=f"of {'; '.join(WAYS)}")
    parser.add_argument("--backend", default="auto", help="grammar backend")
    parser.add_argument("--dtype", default="", help="number type; the model's own by default")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--kv-cache-memory", default="256M")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    parser.add_argument("--json", type=Path, help="where the result goes, and beside it a page")
    args = parser.parse_args()
    rows = measure(args)
    table = record.markdown(rows)
    print(table)
    if args.json is not None:
        title = f"Output tokens with a JSON schema and without: {Path(args.model).name}"
        record.write(args.json, "bench.structured", title, table, {"rows": rows})


if __name__ == "__main__":
    main()
