"""``weft train``: reinforcement learning in one process, with the engine's forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weft.cli import options
from weft.common import log


@click.group()
def train() -> None:
    """Train a model by its own answers."""


@train.command(cls=options.Command)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Folder of the run.")
@click.option("--reward", default="gsm-mini", show_default=True, help="Task with the reward.")
@click.option("--steps", type=int, default=100, show_default=True, help="Number of steps of the run.")
@click.option("--prompts", type=int, default=16, show_default=True, help="Questions per step.")
@click.option("--group", type=int, default=8, show_default=True, help="Answers per question.")
@click.option(
    "--minibatches",
    type=int,
    default=1,
    show_default=True,
    help="Updates per step. With 1, every ratio of probabilities is exactly 1.",
)
@click.option("--lr", type=float, default=1e-5, show_default=True, help="Learning rate of AdamW.")
@click.option("--clip", type=float, default=0.2, show_default=True, help="Clip of the ratio: 1 +- clip.")
@click.option("--grad-norm", type=float, default=1.0, show_default=True, help="Maximum norm of the gradient.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Maximum tokens of an answer.")
@click.option(
    "--pack",
    type=int,
    default=8192,
    show_default=True,
    help="Maximum tokens of a forward pass of the trainer.",
)
@click.option(
    "--eval-every", type=int, default=0, show_default=True, help="Steps between tests; 0: no tests."
)
@click.option("--eval-problems", type=int, default=100, show_default=True, help="Questions of a test.")
@click.option("--save-every", type=int, default=50, show_default=True, help="Steps between checkpoints.")
@options.settings(options.ENGINE, ("log_level",))
def grpo(model_name: str | None, out: str, **given: Any) -> int:
    """Train MODEL by GRPO. Rollouts and training have the same bits, so the KL between both is 0.

    A run in --out continues from the last checkpoint. --out/log.jsonl has a line per step. --seed also
    orders the questions.
    """
    from weft.train.run import Settings

    names = [field for field in Settings.__struct_fields__ if field != "seed"]
    chosen = {name: given.pop(name) for name in names}
    config = options.build(given, model_name)
    log.configure(config.front.log_level)
    settings = Settings(**chosen, seed=config.model.seed or 0)

    from weft import LLM
    from weft.train.run import train

    with LLM(**options.keywords(config)) as llm:
        for line in train(llm, settings, Path(out)):
            tested = f", accuracy {line['accuracy']:.3f}" if "accuracy" in line else ""
            click.echo(
                f"step {line['step']}: reward {line['reward']:.3f}, loss {line['loss']:.4f}, "
                f"KL {line['kl']!r} ({line['unequal']} of {line['compared']} logprobs differ), "
                f"length {line['length']:.1f}{tested}"
            )
    return 0
