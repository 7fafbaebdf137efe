"""Fit the cost model to steps of a real engine, and measure the prediction error on held-out steps.

python -m bench.cost_model --model spool-text --steps 1500 --json cost.json

Pass the file to `weft sim --cost-model cost.json`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.load import engine, model_flags, request
from weft.engine.core import EngineCore
from weft.scheduler.policy.chunk import ChunkPolicy
from weft.scheduler.policy.fit import CostFitter
from weft.scheduler.policy.step_cost import CostModel, StepShape, shape_of
from weft.types.plan import StepPlan

Steps = list[tuple[StepShape, float]]


class Explorer(ChunkPolicy):
    """Choose chunks of random length and record the duration of every step."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        super().__init__(1.0)
        self.steps: Steps = []
        self._rng = rng
        self._longest = longest
        self._left = 0

    def begin(self, starts: np.ndarray) -> None:
        alone = len(starts) > 0 and self._rng.random() < 0.3
        self._left = 0 if alone else int(self._longest ** self._rng.random())

    def room(self, start: int, most: int) -> int:
        return max(min(most, self._left), 0)

    def took(self, start: int, count: int) -> None:
        self._left -= count

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self.steps.append((shape_of(plan), seconds))


def measure(core: EngineCore, steps: int, longest: int, rng: random.Random) -> Steps:
    """Runs ``steps`` steps of varied composition: waves of prompts, and decodes of all contexts."""
    core.scheduler.planner.chunks = explorer = Explorer(rng, longest)
    context, vocabulary = core.welcome(0).max_model_len, core.config.spec.vocab_size
    slots, number = core.config.scheduler.max_num_seqs, 0
    with tqdm(total=steps, desc="measuring", unit="step") as bar:
        while len(explorer.steps) < steps:
            stats = core.stats()
            if not stats.waiting and (not stats.running or rng.random() < 0.03):
                for _ in range(int(max(slots - stats.running, 1) ** rng.random())):
                    prompt = min(int(context ** rng.uniform(0.3, 1.0)), context - 2)
                    tokens = min(int(150 ** rng.random()), context - prompt)
                    core.submit(request(number, prompt, tokens, vocabulary, rng))
                    number += 1
            core.step()
            bar.n = len(explorer.steps)
            bar.update(0)
    return explorer.steps


def report(model: CostModel, steps: Steps) -> float:
    """Prints the relative errors by kind of step; returns the median over all."""
    kinds: dict[str, list[float]] = {"all": [], "prefill": [], "decode": [], "mixed": []}
    for shape, seconds in steps:
        error = abs(model.predict(shape) - seconds) / seconds
        kind = "mixed" if shape.prefill_rows and shape.decode_rows else "prefill"
        kinds["decode" if not shape.prefill_rows else kind].append(error)
        kinds["all"].append(error)
    print(f"{'held-out steps':16}{'count':>7}{'median':>9}{'p90':>9}")
    for kind, errors in kinds.items():
        if errors:
            p90 = sorted(errors)[int(0.9 * (len(errors) - 1))]
            print(f"{kind:16}{len(errors):7}{statistics.median(errors):9.1%}{p90:9.1%}")
    return statistics.median(kinds["all"])


def straight(steps: Steps) -> CostModel:
    """Return the fit seconds = a + b * tokens by ordinary least squares, for comparison."""
    tokens = [shape.tokens for shape, _ in steps]
    slope, step = statistics.linear_regression(tokens, [seconds for _, seconds in steps])
    return CostModel((max(step, 0.0), *[max(slope, 0.0)] * 5, *[0.0] * 5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_flags(parser)
    parser.add_argument("--steps", type=int, default=1500, help="steps to measure")
    parser.add_argument("--longest", type=int, default=1024, help="maximum prompt tokens in one step")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="maximum sequences in one step")
    parser.add_argument("--max-model-len", default="auto", help="maximum tokens of prompt and output")
    parser.add_argument("--steps-in-flight", type=int, default=2, help="1 or 2")
    parser.add_argument("--about", default="", help="description for the file: the model and the machine")
    parser.add_argument("--json", type=Path, help="write the fitted model to this file")
    args = parser.parse_args()
    core = engine(
        args.model,
        args.threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.longest + args.max_num_seqs,
        max_model_len=args.max_model_len,
        steps_in_flight=args.steps_in_flight,
    )
    rng = random.Random(args.seed)
    steps = measure(core, args.steps, args.longest, rng)[20:]  # the first ones warm up
    core.close()
    held = {i for i in range(len(steps)) if rng.random() < 0.3}
    fitter = CostFitter()
    for i, (shape, seconds) in enumerate(steps):
        if i not in held:
            fitter.observe(shape, seconds)
    model = fitter.fit()
    test = [steps[i] for i in sorted(held)]
    report(model, test)
    print("for comparison, a straight line over tokens:")
    report(straight([step for i, step in enumerate(steps) if i not in held]), test)
    print(CostModel(model.coefficients, args.about).to_json().decode())
    if args.json is not None:
        args.json.write_bytes(CostModel(model.coefficients, args.about or model.about).to_json())


if __name__ == "__main__":
    main()
