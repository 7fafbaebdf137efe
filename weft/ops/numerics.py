"""Facts outside a model that decide the bits of a computation, for caches on disk."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from weft.common import env
from weft.ops import cpu
from weft.ops.cpu import build
from weft.ops.cpu.prebuilt import cpu_features

_PACKAGES = (
    *("attention", "gguf", "kv", "layers", "models", "moe", "ops", "overlap", "parallel", "runner"),
    *("speculation", "store"),
)
"""Packages whose code computes, reads weights, or names and places blocks."""
_SUFFIXES = (".py", ".cpp", ".h")
_LIBRARIES = ("triton", "transformers", "flashinfer-python")
"""Libraries that compute if they are installed."""


def numerics(device: torch.device, attention: Iterable[str]) -> dict[str, str]:
    """Return names and values. Two machines with equal values compute equal bits, as far as Weft knows.

    attention: names of the attention backends in use. Reads Weft's sources: call in a thread.
    """
    found = {
        "attention": " ".join(attention),
        "code": code_digest(),
        "torch": torch.__version__,
        "libraries": " ".join(_versions()),
        # Users choose other kernels of torch with these variables.
        "variables": f"{env.get('ONEDNN_MAX_CPU_ISA')} {env.get('MKL_CBWR')}",
    }
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {**found, "gpu": f"{facts.name} {facts.major}.{facts.minor}", "cuda": str(torch.version.cuda)}
    library = build.find() if cpu.load() else None
    features = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:16]
    return {
        **found,
        # The folder of a build is named by sources, flags, CPU, torch and compiler.
        "library": "" if library is None else library.parent.name,
        "instructions": " ".join((*cpu.capabilities(), torch.backends.cpu.get_cpu_capability())),
        "cpu": f"{platform.machine()} {features}",
    }


@functools.cache
def code_digest() -> str:
    """Return the hash of all sources that compute, 16 hex digits."""
    root, made = Path(__file__).parent.parent, hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in _SUFFIXES:
                name = file.relative_to(root).as_posix()
                made.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return made.hexdigest()[:16]


def _versions() -> list[str]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
