"""Checkpoints with changed weights, for tests of live updates."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def read_tensors(folder: Path) -> Tensors:
    """Return all tensors of a checkpoint by published name."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def changed(tensors: Tensors, seed: int, scale: float = 0.5) -> Tensors:
    """Return ``tensors`` with noise in all matrices: ``scale`` is relative to each matrix."""
    generator = torch.Generator().manual_seed(seed)
    made: Tensors = {}
    for name, tensor in tensors.items():
        wide = tensor.float()
        noise = torch.randn(wide.shape, generator=generator) * wide.std() * scale
        made[name] = (wide + noise).to(tensor.dtype) if tensor.dim() > 1 else tensor.clone()
    return made


def write_checkpoint(folder: Path, base: Path, tensors: Tensors) -> Path:
    """Write a checkpoint like ``base`` with other tensors, and return the folder."""
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json")):
            shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder
