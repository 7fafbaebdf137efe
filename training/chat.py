"""Generate greedy chat answers with ``transformers``, and write checkpoints and results for every script."""

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.tokenizer import END_OF_TEXT, TURN_END
from weft.eval.gsm_mini import Problem, score

MAX_NEW_TOKENS = 110  # the longest worked solution is shorter
LOADING_NOTES = ("is_local", "local_files_only")  # keys that record how the tokenizer was loaded


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that end a reply: end of turn, end of text."""
    return [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Return the ids of a problem in chat form."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


@torch.no_grad()
def solve_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], batch: int = 50
) -> list[list[int]]:
    """Return greedy replies to ``prompts``, in order, each with its end id.

    Prompts of similar length share a batch and are padded on the left.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    stops, pad = set(stop_ids(tokenizer)), tokenizer.pad_token_id
    replies: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), batch):
        chunk = order[begin : begin + batch]
        width = max(len(prompts[i]) for i in chunk)
        gaps = [width - len(prompts[i]) for i in chunk]
        ids = torch.tensor([[pad] * gap + prompts[i] for gap, i in zip(gaps, chunk, strict=True)])  # [B, L]
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])  # [B, L]
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        for i, row in zip(chunk, out[:, width:].tolist(), strict=True):
            ends = [j for j, token in enumerate(row) if token in stops]
            replies[i] = row[: ends[0] + 1] if ends else row
    return replies


def solve(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: list[Problem], batch: int = 50
) -> list[str]:
    """Return greedy chat answers to ``asked``, in order."""
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    replies = solve_ids(model, tokenizer, prompts, batch)
    return tokenizer.batch_decode(replies, skip_special_tokens=True)


def tidy(folder: Path, config: Mapping[str, object]) -> None:
    """Make a saved folder portable: add ``config`` to its configuration, sort keys, drop notes on loading."""
    for name, extra in (
        ("config.json", dict(config)),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        known = json.loads((folder / name).read_text()) | extra
        known = {key: value for key, value in known.items() if key not in LOADING_NOTES}
        (folder / name).write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    os.chmod(folder / "model.safetensors", 0o644)


def report(
    args: argparse.Namespace,
    script: str,
    asked: list[Problem],
    answers: list[str],
    measured: dict[str, object],
) -> None:
    """Print and write the figures of an evaluation: accuracy, ``measured``, and the conditions."""
    right = score(answers, asked)
    for problem, answer in zip(asked, answers, strict=True):
        if args.show_errors and score([answer], [problem]) == 0:
            print(f"--- {problem.question}\nwanted: {problem.solution!r}\ngot:    {answer!r}")
    result: dict[str, object] = {"task": "gsm-mini", "problems": len(asked), "exact": right}
    result["accuracy"] = round(right / len(asked), 4)
    write_result(args, script, result | measured)


def write_result(args: argparse.Namespace, script: str, result: dict[str, object]) -> None:
    """Print ``result`` with the conditions of the measurement, and write it to ``--result``."""
    bundled = script.replace("_", "-")
    result = result | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": args.machine,
        "command": f"python -m training.{script} evaluate --checkpoint weft/checkpoints/{bundled}",
    }
    if args.curve:
        curve = json.loads(args.curve.read_text())
        last = curve["curve"][-1]
        result["training"] = curve["recipe"] | {key: last[key] for key in ("step", "tokens", "seconds")}
    print(json.dumps(result, indent=1))
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n")
