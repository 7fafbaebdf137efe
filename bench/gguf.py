"""Compare decoding of one sequence from packed GGUF files with llama.cpp.

python -m bench.gguf --threads 2 --json gguf.json

The script makes the files from random blocks, with the shapes of qwen3-dense-s. Both engines are loaded in
separate processes, and their rounds alternate. The output is the minimum over rounds of the milliseconds per
token. llama.cpp is the package xllamacpp; without the package Weft runs alone. For memory see
``bench.packed_memory``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench import machine

#: Layers, hidden, intermediate, heads, KV heads, head size, vocabulary.
SHAPES = {
    "dense-s": (12, 768, 2304, 12, 4, 64, 16384),
    "tiny": (2, 256, 256, 2, 1, 128, 1024),
    "large": (12, 2048, 6144, 16, 8, 128, 16384),
}
#: Default type of matrices, and types of matrices by a part of the name.
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "BF16": ("BF16", {}),
    "Q8_0": ("Q8_0", {}),
    "Q4_0": ("Q4_0", {}),
    "Q4_K": ("Q4_K", {}),
    "Q6_K": ("Q6_K", {}),
    "Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K"}),
}
#: Byte offsets of the float16 scales of a block, and the approximate factor that the scales multiply.
_SCALES = {"Q8_0": ((0,), 74.0), "Q4_0": ((0,), 4.6), "Q4_K": ((0, 2), 300.0), "Q6_K": ((208,), 1370.0)}
PROMPT = 16
TOKENS = 96


def make(path: Path, shape: str, kind: str) -> None:
    """Writes a Qwen3 of random weights."""
    layers, hidden, inner, heads, kv_heads, size, vocabulary = SHAPES[shape]
    writer = gguf.GGUFWriter(str(path), "qwen3")
    facts = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
    }
    for key, value in facts.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "1", *(f"t{i}" for i in range(vocabulary - 2))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(0)
    matrices = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden)}
    norms = {"output_norm": hidden}
    for layer in range(layers):
        matrices |= {
            f"blk.{layer}.attn_q": (heads * size, hidden),
            f"blk.{layer}.attn_k": (kv_heads * size, hidden),
            f"blk.{layer}.attn_v": (kv_heads * size, hidden),
            f"blk.{layer}.attn_output": (hidden, heads * size),
            f"blk.{layer}.ffn_gate": (inner, hidden),
            f"blk.{layer}.ffn_up": (inner, hidden),
            f"blk.{layer}.ffn_down": (hidden, inner),
        }
        norms |= {f"blk.{layer}.{name}_norm": hidden for name in ("attn", "ffn")}
        norms |= {f"blk.{layer}.attn_{name}_norm": size for name in ("q", "k")}
    for name, length in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))
    for seed, (name, (rows, inputs)) in enumerate(matrices.items()):
        usual, others = KINDS[kind]
        own = next((other for part, other in others.items() if part in f"{name}."), usual)
        made = gguf.GGMLQuantizationType[own]
        writer.add_tensor(f"{name}.weight", _drawn(own, rows, inputs, seed), raw_dtype=made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _drawn(kind: str, rows: int, inputs: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if kind == "BF16":
        values = random.standard_normal((rows, inputs), np.float32) * inputs**-0.5
        cut: np.ndarray = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return cut
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = random.integers(0, 256, (rows, inputs // numbers, size), np.uint8)
    places, largest = _SCALES[kind]
    for at in places:
        raw[..., at : at + 2] = np.array([inputs**-0.5 / largest], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def serve(engine: str, path: str, threads: int) -> None:
    """Read a number of tokens per line from stdin, decode as many tokens, and print the seconds."""
    run = _weft(path, threads) if engine == "weft" else _llama(path, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - began, flush=True)


def _weft(path: str, threads: int) -> Any:
    from weft import LLM, SamplingParams

    llm = LLM(
        path,
        dtype="bfloat16",
        threads=threads,
        max_model_len=512,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    prompt = [{"prompt_token_ids": list(range(5, 5 + PROMPT))}]

    def run(tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (made,) = llm.generate(prompt, params, use_tqdm=False)
        assert len(made.outputs[0].token_ids) == tokens, made.outputs[0]

    return run


def _llama(path: str, threads: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(tokens: int) -> None:
        asked = {"prompt": list(range(5, 5 + PROMPT)), "n_predict": tokens, "temperature": 0}
        answer = server.handle_completions({**asked, "ignore_eos": True, "cache_prompt": False})
        made = answer["usage"]["completion_tokens"]
        assert made == tokens, made

    return run


class Engine:
    """Run ``serve`` in a process of its own."""

    def __init__(self, engine: str, path: Path, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.gguf",
            "--serve",
            engine,
            str(path),
            "--threads",
            str(threads),
        ]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._line("ready")

    def _line(self, wanted: str = "") -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(wanted) if wanted else re.fullmatch(r"[\d.e-]+\n", line):
                return line
        raise RuntimeError("the engine's process ended")

    def seconds(self, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def decode(folder: Path, kinds: list[str], threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds per token by kind and engine."""
    names = ["weft"]
    try:
        import xllamacpp  # noqa: F401

        names.append("llama.cpp")
    except ImportError:
        pass
    found: dict[str, dict[str, float]] = {}
    engines: dict[tuple[str, str], Engine] = {}
    for kind in kinds:
        path = folder / f"dense-s-{kind}.gguf"
        make(path, "dense-s", kind)
        engines |= {(kind, name): Engine(name, path, threads) for name in names}
    best: dict[tuple[str, str], list[float]] = {key: [] for key in engines}
    for number in range(rounds + 1):
        for key, engine in engines.items():
            short = engine.seconds(1)
            took = (engine.seconds(TOKENS + 1) - short) / TOKENS
            if number:  # the first is for warming up
                best[key].append(took * 1e3)
    for (kind, name), times in best.items():
        found.setdefault(kind, {})[name] = round(min(times), 3)
        engines[kind, name].close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"tensor types: {', '.join(KINDS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.serve, args.threads)  # type: ignore[call-arg]
    kinds = args.kinds.split(",")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_CACHE_HOME"] = f"{made}/cache"
        results["decode"] = decode(Path(made), kinds, args.threads, args.rounds)
        for kind, times in results["decode"].items():
            shown = "  ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
            print(f"{kind:8} {shown}  ratio {times['weft'] / times.get('llama.cpp', float('nan')):.2f}")
    if args.json:
        record = {"machine": machine.describe(), "threads": args.threads, **results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
