"""Measure CPU time of decode and prefill with LoRA adapters, and of an engine without places for adapters.

    python -m bench.loras --rows 1 8 64 --adapters 1 8 64 --dtype bfloat16

All variants run in one process with one thread, interleaved. The clock counts the CPU time of the process.
Random weights and random adapters of every linear layer: no token matters. Prints one line per variant with
the time of a decode step or of a prompt token, and the ratio to the engine without places. For decode, also
the ratio of bytes: (model + adapters) / model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from weft import LLM, SamplingParams
from weft.bench.checkpoints import make

MODEL = "qwen3-dense-s"
VOCAB = 16_000


def save_adapter(folder: Path, base: Path, rank: int, seed: int, layers: int | None = None) -> Path:
    """Save a random adapter of every linear layer in the first ``layers`` blocks of ``base`` (None: all).
    Return ``folder``."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a file is no dict)
                shape = file.get_slice(name).get_shape()
                within = layers is None or f".{name}".partition(".layers.")[2].partition(".")[0] in map(
                    str, range(layers)
                )
                if within and "_proj.weight" in name and len(shape) == 2:
                    module = f"base_model.model.{name.removesuffix('.weight')}"
                    a = torch.randn(rank, shape[1], generator=generator) * 0.01
                    b = torch.randn(shape[0], rank, generator=generator) * 0.01
                    tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def seconds(llm: LLM, rows: int, names: list[str], tokens: int, prompt: int) -> float:
    """Return CPU seconds of one call: ``rows`` random prompts of ``prompt`` ids under ``names`` in turn."""
    prompts = [{"prompt_token_ids": random.sample(range(VOCAB), prompt)} for _ in range(rows)]
    lora = [names[row % len(names)] for row in range(rows)] if names else None
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.process_time()
    llm.generate(prompts, params, use_tqdm=False, lora=lora)
    return time.process_time() - began


def decode(llm: LLM, rows: int, names: list[str], tokens: int) -> float:
    """Return CPU seconds of one decode step: a call with ``tokens`` outputs less a call with one."""
    long, short = seconds(llm, rows, names, tokens, 4), seconds(llm, rows, names, 1, 4)
    return (long - short) / (tokens - 1)


def prefill(llm: LLM, names: list[str]) -> float:
    """Return CPU seconds per token of a prompt of 512 tokens."""
    return seconds(llm, 1, names, 1, 512) / 512


def report(what: str, times: dict[str, list[float]], explained: dict[str, float] | None = None) -> None:
    """Print medians, and medians of the ratios to the first variant of the same round. ``explained``: ratios
    that the bytes explain."""
    base = next(iter(times.values()))
    for name, values in times.items():
        ratio = statistics.median(own / first for own, first in zip(values, base, strict=True))
        line = f"{what:18} {name:22} {1e3 * statistics.median(values):9.3f} ms   {ratio:6.3f}"
        if explained is not None and name in explained:
            rest = ratio / explained[name]
            line += f"   bytes explain {explained[name]:6.3f}, measured / explained {rest:6.3f}"
        print(line, flush=True)


def elements(folder: Path) -> int:
    """Return the number of elements of all tensors in ``folder``."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = make(MODEL, Path(folder), progress=False)
        most = max(arguments.adapters)
        modules = {
            f"a{number}": str(save_adapter(Path(folder) / f"a{number}", base, arguments.rank, number))
            for number in range(most)
        }
        common = {
            "dtype": arguments.dtype,
            "quantization": arguments.quantization,
            "device": "cpu",
            "threads": 1,
            "kv_cache_memory": "256M",
            "max_model_len": 1024,
            "enable_prefix_caching": False,
        }
        without = LLM(str(base), **common)
        places = {"max_loras": most, "max_lora_rank": arguments.rank, "lora_modules": modules}
        adapted = LLM(str(base), **places, **common)
        variants = {"no places": (without, []), "places, base rows": (adapted, list[str]())}
        for count in arguments.adapters:
            variants[f"{count} adapters"] = (adapted, list(modules)[:count])
        share = elements(Path(modules["a0"])) / elements(base)
        explained = {name: 1 + len(one[1]) * share for name, one in variants.items()}
        for rows in arguments.rows:
            fitting = {name: one for name, one in variants.items() if len(one[1]) <= rows}
            times: dict[str, list[float]] = {name: [] for name in fitting}
            for _ in range(arguments.rounds):
                for name, (llm, names) in fitting.items():
                    times[name].append(decode(llm, rows, names, arguments.tokens))
            report(f"decode, {rows} rows", times, {name: explained[name] for name in fitting})
        times = {name: [] for name in variants}
        for _ in range(arguments.rounds):
            for name, (llm, names) in variants.items():
                times[name].append(prefill(llm, names[:1]))
        report("prefill, 512", times)


if __name__ == "__main__":
    main()
