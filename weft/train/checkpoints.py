"""Checkpoints of a training run: a folder that ``weft serve`` can serve, and the state of the trainer.

OUT/log.jsonl                  one line per step
OUT/checkpoint-000040/         config, tokenizer, model.safetensors
OUT/checkpoint-000040/trainer/ master weights and optimizer state (safetensors), step and settings (JSON)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from weft.common.errors import ConfigError
from weft.train.policy import Policy

Tensor = torch.Tensor

_WEIGHTS = re.compile(r"\.(?:safetensors|bin|pt|pth|gguf)$|\.index\.json$")
_NAME = re.compile(r"checkpoint-(\d{6,})")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def write_model(target: Path, source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a model folder: ``tensors`` as model.safetensors, and all other files of ``source``."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not _WEIGHTS.search(file.name):
            shutil.copyfile(file, target / file.name)
    own = {name: tensor.contiguous() for name, tensor in tensors}
    save_file(own, target / "model.safetensors", metadata={"format": "pt"})


def save(
    out: Path, step: int, source: Path, policy: Policy, optimizer: torch.optim.Optimizer, about: Any
) -> Path:
    """Write the checkpoint after ``step`` and return its folder. A failed write leaves no checkpoint.

    ``about``: settings of the run, as JSON. Raises ConfigError for a folder that cannot be written.
    """
    target = out / f"checkpoint-{step:06d}"
    partial = out / f".checkpoint-{step:06d}.partial"
    remove_partial(out)
    try:
        write_model(partial, source, policy.tensors())
        _write_state(partial / "trainer", step, policy, optimizer, about)
        for path in partial.rglob("*"):
            # Without the flush, a crash of the machine could leave a renamed folder without contents.
            if path.is_file():
                _flush(path)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {step} cannot be written to {out} ({error}); free disk space, then the same command "
            "continues from the last checkpoint",
            param="--out",
        ) from error
    finally:
        remove_partial(out)
    return target


def remove_partial(out: Path) -> None:
    """Delete checkpoints that a stopped process left incomplete."""
    for partial in out.glob(".checkpoint-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_state(
    folder: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, about: Any
) -> None:
    state = {f"master.{name}": one.detach() for name, one in policy.parameters.items()}
    for name, one in policy.parameters.items():
        for moment, value in optimizer.state.get(one, {}).items():
            state[f"{moment}.{name}"] = torch.as_tensor(value)
    folder.mkdir()
    save_file(state, folder / "state.safetensors")
    text = json.dumps({"step": step, "settings": about}, indent=1)
    (folder / "state.json").write_text(text + "\n", encoding="utf-8")


def latest(out: Path) -> Path | None:
    """Return the folder of the last checkpoint; None without one."""
    found = [path for path in out.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


def restore(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, about: Any) -> int:
    """Load the state of the trainer from a checkpoint. Return its step.

    Raises ConfigError for settings other than ``about``, for a checkpoint of another model, and for a missing
    or damaged state.
    """
    try:
        saved = json.loads((folder / "trainer" / "state.json").read_text(encoding="utf-8"))
        state = load_file(folder / "trainer" / "state.safetensors")
        step, settings = int(saved["step"]), dict(saved["settings"])
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"the state of the trainer in {folder} cannot be read ({error}); delete this checkpoint to "
            "continue from the previous checkpoint, or give another --out",
            param="--out",
        ) from error
    # JSON turns tuples into lists, so both sides are compared as JSON.
    now = json.loads(json.dumps(about))
    changed = sorted(name for name, value in now.items() if settings.get(name) != value)
    if changed:
        raise ConfigError(
            f"{folder.parent} was started with other settings: {', '.join(changed)}; give the same settings, "
            "or another --out",
            param="--out",
        )
    for name, one in policy.parameters.items():
        master = state.get(f"master.{name}")
        if master is None or master.shape != one.shape:
            raise ConfigError(f"{folder} belongs to another model: {name} differs", param="--out")
        with torch.no_grad():
            one.copy_(master)
        moments = {moment: state.get(f"{moment}.{name}") for moment in _MOMENTS}
        # AdamW has its step counter on the CPU, and the other state on the device of the parameter.
        optimizer.state[one] = {
            moment: value if moment == "step" else value.to(one.device)
            for moment, value in moments.items()
            if value is not None
        }
    policy.settle()
    return step
