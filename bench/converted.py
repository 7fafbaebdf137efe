"""Convert a checkpoint to the formats of the peers, in the folder of the peers' environments."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
#: GGUF's name of a dtype.
GGUF = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
#: llama.cpp's types of about 8 and 4 bits.
LLAMA_CPP = {"int8": "q8_0", "int4": "q4_k_m"}
#: Maximum seconds for one conversion.
DEADLINE = 900


class Missing(Exception):
    """Report that a peer cannot run here. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Source:
    """Name a checkpoint and the folder for its conversions."""

    model: Path
    dtype: str
    folder: Path
    """Folder of the peers' environments."""


def gguf(source: Source, weights: str) -> Path:
    """Return a GGUF file for llama.cpp, in the checkpoint's dtype or quantized by llama.cpp's tools to
    ``weights``.

    Raise Missing if the file cannot be made here.
    """
    kind = LLAMA_CPP.get(weights) or GGUF.get(source.dtype)
    if kind is None:
        raise Missing(f"no GGUF type for {source.dtype}")
    first = "q8_0" if weights == "int8" else GGUF.get(source.dtype, "bf16")

    def plain(out: Path) -> None:
        python = source.folder / "transformers/bin/python"
        sources = source.folder / "llamacpp/sources"
        _run([python, PEERS / "to_gguf.py", sources, source.model, out, first], "its converter")

    made = _kept(source, source.folder / f"{source.model.name}-{first}.gguf", plain)
    if kind == first:
        return made
    quantize = source.folder / "llamacpp/bin/llama-quantize"
    if not quantize.exists():
        raise Missing("llama-quantize is not set up: bash bench/peers/setup.sh llamacpp")
    target = source.folder / f"{source.model.name}-{kind}.gguf"
    return _kept(source, target, lambda out: _run([quantize, made, out, kind], "llama-quantize"))


def openvino(source: Source, weights: str) -> Path:
    """Return a folder for OpenVINO, exported by optimum-intel with its default settings for ``weights``.

    Without ``weights`` the exporter stores 16 bits (always float16), or 32 bits for a float32 checkpoint.
    Raise Missing if the export fails.
    """
    program = source.folder / "openvino/bin/optimum-cli"
    form = weights or ("fp32" if source.dtype == "float32" else "fp16")
    words = ("export", "openvino", "--model", source.model, "--task", "text-generation-with-past")
    command = [program, *words, "--weight-format", form]
    target = source.folder / f"{source.model.name}-openvino-{form}"
    # Graphs are traced in one thread, and compressed in all.
    return _kept(source, target, lambda out: _run([*command, out], "its exporter", {"HF_HUB_OFFLINE": "1"}))


def compressed(source: Source, weights: str, python: Path) -> Path:
    """Return a checkpoint in compressed-tensors' format for vLLM, rounded to nearest."""
    target = source.folder / f"{source.model.name}-compressed-{weights}"
    command = [python, PEERS / "to_compressed.py", source.model]
    return _kept(source, target, lambda out: _run([*command, out, weights], "to_compressed.py"))


def _kept(source: Source, target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``. Call ``make`` if ``target`` is absent or older than the model.

    A rename makes ``target`` appear complete or not at all.
    """
    weights = list(source.model.glob("*.safetensors"))
    if target.exists() and all(target.stat().st_mtime >= path.stat().st_mtime for path in weights):
        return target
    half = target.with_name(f"half-made-{target.name}")
    _remove(half)
    try:
        make(half)
        _remove(target)
        half.rename(target)
        os.utime(target)
    finally:
        _remove(half)
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(command: Sequence[object], who: str, environment: Mapping[str, str] | None = None) -> None:
    """Run the command. Raise Missing with the last lines of output after a failure, and after DEADLINE
    seconds.
    """
    try:
        made = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"{who} was not ready within {DEADLINE} s") from None
    if made.returncode:
        said = (made.stderr.strip() or made.stdout.strip()).splitlines()
        raise Missing(f"{who} refused the model: " + "; ".join(line.strip() for line in said[-2:]))
