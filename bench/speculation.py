"""Measure speculation: output tokens per second by number of drafts, acceptance, and cost of a step.

python -m bench.speculation --model spool-mla --json speculation.json
python -m bench.speculation --model qwen3-dense-s --load-format dummy --method ngram --random-prompts 64 \\
    --ignore-eos --dtype float32 --threads 1 --temperature 1

Each number of drafts has an engine. All engines are loaded at once, and rounds are interleaved, so that a
slow phase of the machine affects all engines. A round answers the same questions greedily, one batch at a
time. The cost of a step is the median time of steps that only decode the whole batch, drafting included. The
possible gain is (1 + accepted drafts per step) / (step time relative to a step without drafts). "share" is
the achieved part of the possible gain, in tokens per second after the prompts.

With ``--temperature`` answers are sampled with the same seeds for every engine, so the answers stay equal.
With random weights almost no draft is accepted then; an ``--alphabet`` of N tokens raises the acceptance to
about 1 in N. ``--cold`` counts from the first answer of an engine, trials and captures included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record
from weft import LLM, SamplingParams
from weft.bench.workloads import random_ids
from weft.eval.gsm_mini import test_set
from weft.types.plan import StepPlan


@dataclass
class Runs:
    """Hold the runs of one engine with one batch size."""

    seconds: float = 0.0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    sequences: int = 0
    prompts: float = 0.0
    """Seconds of steps with prompts, which produce the first token of each sequence."""
    rows: int = 0
    """Decode rows of all other steps."""
    steps: list[float] = field(default_factory=list)
    """Seconds of steps that only decode the whole batch."""

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second without first tokens and without the steps that produce them."""
        return (self.tokens - self.sequences) / (self.seconds - self.prompts)

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps)


class Engine:
    """Wrap an ``LLM`` and record the durations of its steps."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.llm = LLM(**settings)
        self.runs: dict[int, Runs] = {}
        self._now: Runs | None = None
        self._batch = 0
        core = self.llm._core
        assert core is not None
        observe = core.scheduler.observe

        def listening(plan: StepPlan, seconds: float, uncaptured: bool = False) -> None:
            if self._now is not None:
                self._note(self._now, plan, seconds)
            observe(plan, seconds, uncaptured)

        core.scheduler.observe = listening  # type: ignore[method-assign]

    def _note(self, runs: Runs, plan: StepPlan, seconds: float) -> None:
        if plan.prefill.rows:
            runs.prompts += seconds
            return
        runs.rows += plan.decode.rows
        if plan.decode.rows == self._batch:
            runs.steps.append(seconds)

    def _answer(self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams]) -> list[Any]:
        """Answer questions through the chat template; continue token ids."""
        if isinstance(prompts[0], str):
            talks: Any = [[{"role": "user", "content": text}] for text in prompts]
            return list(self.llm.chat(talks, list(params), use_tqdm=False))
        ids: Any = [{"prompt_token_ids": one} for one in prompts]
        return list(self.llm.generate(ids, list(params), use_tqdm=False))

    def round(
        self, questions: Sequence[Any], batch: int, params: Sequence[SamplingParams], *, count: bool
    ) -> list[Any]:
        """Answer all questions, ``batch`` at a time. Record the figures if ``count``. ``params`` has one
        entry per question.
        """
        runs = self.runs.setdefault(batch, Runs())
        self._now, self._batch = (runs if count else None), batch
        answers = []
        for begin in range(0, len(questions), batch):
            asked = slice(begin, begin + batch)
            began = time.perf_counter()
            made = self._answer(questions[asked], params[asked])
            seconds = time.perf_counter() - began
            outputs = [request.outputs[0] for request in made]
            answers += [output.token_ids for output in outputs]
            if count:
                runs.seconds += seconds
                runs.sequences += len(outputs)
                runs.tokens += sum(len(output.token_ids) for output in outputs)
                runs.accepted += sum(output.num_accepted_drafts for output in outputs)
                runs.drafted += sum(o.num_accepted_drafts + o.num_rejected_drafts for o in outputs)
        return answers


def line(name: str, batch: int, runs: Runs, off: Runs) -> dict[str, Any]:
    """Return one row of the table."""
    per_step = (runs.tokens - runs.sequences) / runs.rows
    cost = runs.step / off.step
    gain = runs.decode_rate / off.decode_rate
    return {
        "drafts": name,
        "batch": batch,
        "tok/s": round(runs.rate, 1),
        "gain": round(runs.rate / off.rate, 3),
        "behind prompts": round(runs.decode_rate, 1),
        "gain behind": round(gain, 3),
        "acceptance": round(runs.accepted / runs.drafted, 3) if runs.drafted else None,
        "tokens a step": round(per_step, 3),
        "step ms": round(1e3 * runs.step, 3),
        "over plain": round(cost, 3),
        "possible gain": round(per_step / cost, 3),
        "share": round(gain / (per_step / cost), 3),
    }


def asked(args: argparse.Namespace, vocabulary: int) -> tuple[list[Any], list[SamplingParams]]:
    """Return the questions and the sampling parameters of every round."""
    if args.random_prompts:
        prompts: list[Any] = [
            random_ids(f"speculation {n}", args.random_prompts, vocabulary) for n in range(args.questions)
        ]
    else:
        prompts = [problem.question for problem in test_set(args.questions)]
    few = random_ids("alphabet", args.alphabet, vocabulary) if args.alphabet else None
    common = {"max_tokens": args.max_tokens, "ignore_eos": args.ignore_eos, "allowed_token_ids": few}
    return prompts, [
        SamplingParams(temperature=args.temperature, seed=n, **common) for n in range(len(prompts))
    ]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the table, by batch size."""
    common: dict[str, Any] = {
        "model": args.model,
        "threads": args.threads,
        "max_model_len": args.max_model_len,
    }
    common |= {"kv_cache_memory": "256M", "enable_prefix_caching": False}
    common |= {"dtype": args.dtype} if args.dtype else {}
    common |= {"load_format": args.load_format} if args.load_format else {}
    engines = [Engine("0", common)]
    for drafts in args.drafts:
        more = {"speculative_method": args.method, "num_speculative_tokens": drafts}
        engines.append(Engine(str(drafts), {**common, **more, "speculative_adaptive": False}))
    if args.adaptive:
        more = {"speculative_method": args.method, "num_speculative_tokens": max(args.drafts)}
        engines.append(Engine(f"up to {max(args.drafts)}", {**common, **more}))
    questions, params = asked(args, engines[0].llm.config.spec.vocab_size)
    rows = []
    for batch in args.batches:
        for engine in () if args.cold else engines:
            engine.round(questions[: 2 * batch], batch, params, count=False)
            for _ in range(args.warm_up):
                engine.round(questions, batch, params, count=False)
        answers: list[list[Any]] = []
        for number in range(args.rounds):
            # Alternate the order of engines, so that a drift of the machine affects all alike.
            order = engines if number % 2 == 0 else engines[::-1]
            answers += [engine.round(questions, batch, params, count=True) for engine in order]
        assert all(answer == answers[0] for answer in answers), "answers differ"
        off = engines[0].runs[batch]
        rows += [line(engine.name, batch, engine.runs[batch], off) for engine in engines]
    for engine in engines:
        engine.llm.shutdown()
    return rows


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-mla")
    parser.add_argument("--method", default="mtp", choices=["mtp", "ngram"])
    parser.add_argument(
        "--drafts", type=integers, default=[1, 2, 3], help="numbers of drafts, in addition to 0"
    )
    parser.add_argument("--batches", type=integers, default=[1, 8])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=0, help="uncounted rounds for captures and step costs")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--cold", action="store_true", help="count from an engine's first answer on")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: sampling with fixed seeds")
    parser.add_argument(
        "--alphabet", type=int, default=0, help="number of tokens allowed in answers; 0 for all"
    )
    parser.add_argument(
        "--random-prompts", type=int, default=0, help="tokens of random prompts; 0 for questions"
    )
    parser.add_argument("--load-format", default="", help="dummy: random weights")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of --max-tokens tokens")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--no-adaptive", dest="adaptive", action="store_false")
    parser.add_argument("--json", type=Path, help="file for the figures, with a .md beside")
    args = parser.parse_args()
    rows = measure(args)
    table = record.markdown(rows)
    print(table)
    if args.json is not None:
        title = f"Speculation: {args.model}, {args.method}"
        numbers = {"model": args.model, "method": args.method, "rows": rows}
        record.write(args.json, "bench.speculation", title, table, numbers)


if __name__ == "__main__":
    main()
