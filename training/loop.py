"""Train the bundled checkpoints: workers that average gradients, schedule, progress, resuming.

A script supplies a ``Script``: the model, the loss and the watched figures. A run has a folder with
``state.pt`` for resuming, ``checkpoint/`` and ``curve.json``.
"""

import argparse
import itertools
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.rows import Encoder, batches
from weft.eval.gsm_mini import Problem, problems

STOPPED = 20.0  # seconds; a longer step means that the process was stopped, and the excess does not count
DEV_SEED = 77  # the held-out sample watched during training; the 500 test problems have another seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hold the settings of a run. ``batch_tokens`` counts padding. With ``minutes`` the clock ends the run.

    ``start`` is a checkpoint folder for the initial weights, instead of random weights.
    """

    seed: int = 1
    steps: int = 6800
    minutes: float = 0.0
    batch_tokens: int = 4096
    lr: float = 2e-3
    lr_end: float = 2e-5
    warmup: int = 100
    weight_decay: float = 0.05
    question_weight: float = 0.1
    tool_share: float = 0.0
    recall_share: float = 0.0
    start: str = ""
    bf16: bool = True


R = TypeVar("R", bound=Recipe)
Batch = tuple[Tensor, ...]


class Script(ABC, Generic[R]):
    """Define the interface between a training script and the loop."""

    recipe: type[R]

    @abstractmethod
    def tokenizer(self, folder: Path) -> PreTrainedTokenizerFast:
        """The tokenizer of the run in ``folder``; the same in every worker and when resumed."""

    @abstractmethod
    def new_model(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        """A random model in float32."""

    def batches(
        self, tokenizer: PreTrainedTokenizerFast, recipe: R, first_pool: int, batch_tokens: int
    ) -> Iterator[Batch]:
        """Return an endless iterator of batches for ``loss``; ids [B, L] come first. Each pool has different
        data.
        """
        encoder = Encoder(tokenizer, recipe.question_weight, recipe.tool_share, recipe.recall_share)
        return batches(encoder, recipe.seed, first_pool, batch_tokens)

    @abstractmethod
    def loss(
        self, model: PreTrainedModel, batch: Batch, recipe: R, progress: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and the means to report: ``answer_loss`` and others."""

    @abstractmethod
    def export(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder."""

    def start_from(self, start: Path, folder: Path) -> None:
        """Copy everything except the weights from a checkpoint into the folder of a new run."""

    def weights(self, start: Path) -> dict[str, Tensor]:
        """The weights in a checkpoint folder, in float32 and by the model's own names."""
        raise SystemExit(f"--start: {type(self).__name__} begins with random weights only")

    @abstractmethod
    def watch(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n: int) -> dict[str, float]:
        """Measures on ``n`` held-out problems; the model is in evaluation mode."""

    def optimizers(self, model: PreTrainedModel, recipe: R) -> list[torch.optim.Optimizer]:
        """Return optimizers for all parameters. ``lr`` of a group is the peak rate, which the schedule
        scales.
        """
        decay = recipe.weight_decay
        return [
            torch.optim.AdamW(
                model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=decay, fused=True
            )
        ]

    def counters(self, model: PreTrainedModel) -> list[Tensor]:
        """Return float tensors of the step to average over the workers with the gradients."""
        return []

    def after_step(self, model: PreTrainedModel, recipe: R) -> None:
        """Called after every optimizer step, with the counters averaged."""


def held_out(n: int) -> list[Problem]:
    """Return the first ``n`` of the held-out problems for evaluation during training."""
    return list(itertools.islice(problems("test", DEV_SEED), n))


def rate_at(recipe: Recipe, step: int, progress: float) -> float:
    """Return the rate as a share of the peak: linear warm-up, then a cosine down to ``lr_end``."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    end = recipe.lr_end / recipe.lr
    return end + 0.5 * (1 - end) * (1 + math.cos(math.pi * progress))


class Run:
    """Hold the state of a training run in one of its workers."""

    def __init__(self, folder: Path, script: Script[R], recipe: Recipe) -> None:
        self.folder, self.script, self.recipe = folder, script, recipe
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = script.tokenizer(folder)
        torch.manual_seed(recipe.seed)
        self.model = script.new_model(self.tokenizer)
        self.optimizers = script.optimizers(self.model, recipe)
        self.step = self.tokens = self.pool = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        if (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt", weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, known in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(known)
            self.step, self.tokens, self.pool = state["step"], state["tokens"], state["pool"]
            self.seconds, self.curve = state["seconds"], state["curve"]
        elif recipe.start:
            self.model.load_state_dict(script.weights(Path(recipe.start)))
        self.last = time.time()

    def save(self) -> None:
        """Write state, checkpoint and curve. Pools advance, so a resumed run reads new problems."""
        state = {name: getattr(self, name) for name in ("step", "tokens", "pool", "seconds", "curve")}
        state["model"] = self.model.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(state, self.folder / "state.tmp")
        (self.folder / "state.tmp").replace(self.folder / "state.pt")
        self.script.export(self.model, self.tokenizer, self.folder / "checkpoint")
        text = json.dumps({"recipe": asdict(self.recipe), "curve": self.curve}, indent=1)
        (self.folder / "curve.json").write_text(text + "\n")

    def progress(self) -> float:
        """Return the completed share of the run, by the clock that all workers averaged in the last step."""
        if self.recipe.minutes:
            return min(1.0, self.seconds / (60 * self.recipe.minutes))
        warmup = self.recipe.warmup
        return min(1.0, max(0, self.step - warmup) / max(1, self.recipe.steps - warmup))

    def done(self) -> bool:
        """Return True if the recipe is finished."""
        return self.progress() >= 1 if self.recipe.minutes else self.step >= self.recipe.steps

    def update(self, *batch: Tensor) -> dict[str, float]:
        """Run one optimizer step on a batch. Return the means to report."""
        progress = self.progress()
        rate = rate_at(self.recipe, self.step, progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bf16):
            total, means = self.script.loss(self.model, batch, self.recipe, progress)
        total.backward()
        clock = torch.tensor([self.seconds + min(time.time() - self.last, STOPPED)])
        self.last = time.time()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if dist.is_initialized():
            average([*grads, *self.script.counters(self.model), clock])
        self.seconds = float(clock)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            peaks = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= rate
            optimizer.step()
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak
            optimizer.zero_grad(set_to_none=True)
        self.script.after_step(self.model, self.recipe)
        self.step += 1
        self.tokens += batch[0].numel() * (dist.get_world_size() if dist.is_initialized() else 1)
        return {name: float(value) for name, value in means.items()}

    def watch(self, n: int) -> dict[str, float]:
        """Return the script's figures on ``n`` held-out problems, in eval mode."""
        self.model.eval()
        seen = self.script.watch(self.model, self.tokenizer, n)
        self.model.train()
        return seen


def average(tensors: list[Tensor]) -> None:
    """Replace float tensors by their means over the workers, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def train(script: Script, args: argparse.Namespace) -> None:
    """Run or resume a training run in ``args.out``, with one single-threaded process per worker.

    Processes that meet once per step lose less to a busy neighbour than threads that meet in every operator.
    """
    recipe = script.recipe(**{name: getattr(args, name) for name in asdict(script.recipe())})
    args.out.mkdir(parents=True, exist_ok=True)
    if recipe.start:
        script.start_from(Path(recipe.start), args.out)
    script.tokenizer(args.out)  # write the tokenizer before the workers read it
    del args.call  # not for other processes
    torch.multiprocessing.spawn(work, (script, args, recipe), nprocs=args.workers)


def work(rank: int, script: Script, args: argparse.Namespace, recipe: Recipe) -> None:
    """Run one worker. Rank 0 also evaluates, reports and saves."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(args.out / f"store-{os.getppid()}"), args.workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.workers)
    run = Run(args.out, script, recipe)
    if rank == 0:
        print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, step {run.step}", flush=True)
    # Pools of workers are 1000 apart, and a resumed run starts behind all of them: no problem repeats.
    first_pool, run.pool = run.pool + 1000 * rank, run.pool + 1000 * args.workers
    stream = script.batches(run.tokenizer, recipe, first_pool, recipe.batch_tokens // args.workers)
    progress = Progress(run, args.log)
    saved = time.time()
    while not run.done():
        progress.add(run.update(*next(stream)))
        due = run.step % args.eval_every == 0 or run.done()
        if rank:
            continue
        if due or run.step % args.log == 0:
            progress.report(run.watch(args.dev) if due else {})
        if due or time.time() - saved > args.save_seconds:
            run.save()
            saved = time.time()
    dist.barrier()
    dist.destroy_process_group()


class Progress:
    """Means of the steps since the last report; a report is a line and a row of the curve."""

    def __init__(self, run: Run, log: int) -> None:
        self.run, self.log = run, log
        self.sums: dict[str, list[float]] = {}
        self.last = (time.time(), run.tokens)

    def add(self, means: dict[str, float]) -> None:
        """Note a step."""
        for name, value in means.items():
            self.sums.setdefault(name, []).append(value)

    def report(self, seen: dict[str, float]) -> None:
        """Append a row with the means and with ``seen`` to the curve, and print the row."""
        run = self.run
        row: dict[str, float] = {"step": run.step, "tokens": run.tokens, "seconds": round(run.seconds, 1)}
        row |= {name: round(sum(values) / len(values), 5) for name, values in self.sums.items()} | seen
        run.curve.append(row)
        now = time.time()
        pace = (run.tokens - self.last[1]) / (now - self.last[0])
        rate = rate_at(run.recipe, run.step, run.progress())
        print(json.dumps(row), f"rate {rate:.3f}, {pace:.0f} tok/s", flush=True)
        self.sums, self.last = {}, (now, run.tokens)


def add_train_parser(commands: argparse._SubParsersAction, script: Script) -> None:
    """The ``train`` command with a flag for every field of the recipe."""
    run = commands.add_parser(
        "train", help="train or resume", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    run.set_defaults(call=lambda args: train(script, args))
    run.add_argument("--out", type=Path, required=True, help="folder of the run; resumes if it has a state")
    for name, value in asdict(script.recipe()).items():
        flag, text = "--" + name.replace("_", "-"), f"recipe: {name.replace('_', ' ')}"
        if isinstance(value, bool):
            run.add_argument(flag, action=argparse.BooleanOptionalAction, default=value, help=text)
        else:
            run.add_argument(flag, type=type(value), default=value, help=text)
    run.add_argument("--log", type=int, default=50, help="steps between progress lines")
    run.add_argument("--eval-every", type=int, default=400, help="steps between evaluations and checkpoints")
    run.add_argument("--save-seconds", type=float, default=180, help="seconds between checkpoints")
    run.add_argument("--workers", type=int, default=2, help="processes of one thread that share each step")
    run.add_argument("--dev", type=int, default=100, help="held-out problems watched during training")


def add_evaluate_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add and return the parser of the ``evaluate`` command. The caller sets the function to call."""
    check = commands.add_parser(
        "evaluate",
        help="measures on the test set",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    check.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder")
    check.add_argument("--n", type=int, default=500, help="problems")
    check.add_argument("--result", type=Path, help="write the numbers here as JSON")
    check.add_argument("--curve", type=Path, help="curve.json of the run, to put its recipe into the result")
    check.add_argument("--machine", default="", help="the machine in words, for the result")
    check.add_argument("--show-errors", action="store_true", help="print the problems that were missed")
    check.add_argument("--threads", type=int, default=2, help="CPU threads")
    return check
