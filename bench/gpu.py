"""Measure offline speed on one GPU, beside the limits of the machine and beside transformers.

python -m bench.gpu --model qwen3-dense-s --model llama-3-8b --transformers --json gpu.json

The first table has all matrix products of a layer of llama-3-8b, in bfloat16 and with packed weights.

For each model the script runs the workloads W1 to W3 (`weft/bench/workloads.py`). Decode steps at batch 1 and
64 are compared with the time to read weights and keys at the measured copy bandwidth. The prompts of W3 are
compared with the measured rate of a matrix product. llama-3-8b is the published shape with random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import gpu_products, record
from bench.load import engine
from weft.bench.checkpoints import RECIPES, make
from weft.bench.offline import Ids, headline, measure
from weft.bench.workloads import WORKLOADS, random_ids
from weft.common.errors import WeftError
from weft.config.sizing.memory import weight_bytes
from weft.config.spec import DTYPE_BYTES, ModelSpec
from weft.engine.core import EngineCore
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import TokenParams

OFFLINE = tuple(one for one in WORKLOADS.values() if one.concurrency is None)
#: The fields of meta-llama/Meta-Llama-3-8B's config.json that decide its speed.
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


MODELS = ("qwen3-dense-s", "llama-3-8b")
DUMMY = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy"}
"""Settings of an engine with random weights on a GPU."""


def head_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the output matrix."""
    return spec.vocab_size * spec.hidden * DTYPE_BYTES[dtype]


def decode_bytes(spec: ModelSpec, dtype: str, rows: int, context: int) -> int:
    """Return the bytes that one step of ``rows`` tokens reads: weights, keys and values."""
    weights = weight_bytes(spec, dtype) - (0 if spec.tied else head_bytes(spec, dtype))
    kv = sum(
        len(cache.layers) * 2 * cache.kv_heads * cache.head_dim * min(context, cache.window or context)
        for cache in spec.caches
    )
    return weights + rows * kv * DTYPE_BYTES[dtype]


def prefill_flops(spec: ModelSpec, rows: int, prompt: int) -> int:
    """Operations of ``rows`` prompts of a dense model: all products, causal attention, one logit row each."""
    weights = weight_bytes(spec, "float16") // DTYPE_BYTES["float16"]
    head = spec.vocab_size * spec.hidden
    layers = weights - head * (1 if spec.tied else 2)
    pairs = prompt * (prompt + 1) // 2
    attention = 4 * spec.layers * spec.heads * spec.head_dim * pairs
    return rows * (2 * layers * prompt + attention + 2 * head)


def write_llama(folder: Path) -> Path:
    """Write Llama-3-8B's config.json, for random weights, and return the folder."""
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
    return folder


def model_folder(name: str, scratch: Path) -> Path:
    """Write the configuration of the model ``name`` below ``scratch``, and return its folder."""
    folder = scratch / name
    if name in RECIPES:
        make(name, folder)
    else:
        folder.mkdir()
        write_llama(folder)
    return folder


def timed(run: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of ``run`` on the GPU over ``rounds`` rounds, after one warm-up."""
    seconds = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def ceilings(rounds: int) -> dict[str, Any]:
    """Return the limits of this GPU: bytes per second of a copy, operations per second of a product."""
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = timed(lambda: torch.matmul(a, b), rounds)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_second": gpu_products.copy_rate(),
        "product_flops_per_second": 2 * side**3 / product,
    }


def model_table(models: dict[str, Any]) -> str:
    """Return the table of workloads, one row per model and engine."""
    units = ("W1 output tok/s", "W2 ms/token", "W3 prompt tok/s")
    rows = []
    for name, found in models.items():
        for who in ("weft", "transformers"):
            if who not in found:
                continue
            results = found[who].get("workloads", found[who])
            numbers = [headline(one, results[one.name]).rsplit(" ", 2)[0] for one in OFFLINE]
            decode = prefill = None
            if who == "weft":
                steps = found[who]["decode"].values()
                decode = ", ".join(f"{s['ms_per_step']:.2f} ({s['share_of_bandwidth']:.0%})" for s in steps)
                rate, share = (
                    found[who][key] for key in ("prefill_flops_per_second", "prefill_share_of_product")
                )
                prefill = f"{rate / 1e12:.0f} ({share:.0%})"
            row = {"model": name, "": who, **dict(zip(units, numbers, strict=True))}
            row["decode 1, 64: ms a step (share of a copy's bandwidth)"] = decode
            row["prefill TFLOP/s (share of a product's)"] = prefill
            rows.append(row)
    return record.markdown(rows)


class Driver:
    """Run prompts through an engine in this thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._numbers = itertools.count(1)

    def generate(self, ids: Ids, tokens: int) -> Ids:
        """Exactly ``tokens`` greedy tokens after each prompt. Raises WeftError when a request fails."""
        made: dict[int, list[int]] = {}
        for one in ids:
            number = next(self._numbers)
            made[number] = []
            self.core.submit(
                Submit(
                    sequence=number,
                    request=number,
                    seed=number,
                    prompt_ids=ids_to_bytes(one),
                    params=TokenParams(temperature=0.0, max_tokens=tokens),
                )
            )
        while self.core.has_work():
            for event in self.core.step():
                if event.error is not None:
                    raise WeftError(f"a request failed: {event.error.message}")
                made[event.sequence] += event.token_ids
        return list(made.values())


def decode_seconds(driver: Driver, rows: int, prompt: int, tokens: int, rounds: int) -> float:
    """Return the median seconds of one decode step: the extra time of ``tokens`` more tokens, with new
    prompts each round.
    """
    vocabulary, found = driver.core.config.spec.vocab_size, []
    for turn in range(rounds + 1):
        spent = []
        for count in (1, 1 + tokens):
            ids = [random_ids(f"decode {turn} {count} {i}", prompt, vocabulary) for i in range(rows)]
            began = time.perf_counter()
            driver.generate(ids, count)
            spent.append(time.perf_counter() - began)
        if turn:
            found.append((spent[1] - spent[0]) / tokens)
    return statistics.median(found)


def bench_weft(folder: Path, machine: dict[str, Any], args: argparse.Namespace, tick: Any) -> dict[str, Any]:
    """Return the results of Weft: workloads, decode beside memory bandwidth, prompts beside matrix
    products."""
    began = time.perf_counter()
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": args.max_num_batched_tokens}
    core = engine(str(folder), 0, **{**DUMMY, **settings, **dict(args.set)})
    ready, spec, driver = time.perf_counter() - began, core.config.spec, Driver(core)
    results = measure(driver.generate, OFFLINE, args.rounds, 0, spec.vocab_size, tick)
    decode = {}
    for rows in (1, 64):
        seconds = decode_seconds(driver, rows, args.context, args.tokens, args.rounds)
        least = decode_bytes(spec, "bfloat16", rows, args.context + args.tokens // 2)
        least_seconds = least / machine["copy_bytes_per_second"]
        decode[str(rows)] = {
            "ms_per_step": 1e3 * seconds,
            "tokens_per_second": rows / seconds,
            "least_ms": 1e3 * least_seconds,
            "share_of_bandwidth": least_seconds / seconds,
        }
        tick(f"decode {rows}")
    w3 = WORKLOADS["W3"]
    flops = prefill_flops(spec, w3.requests, w3.prompt_tokens) / results["W3"]["seconds"]
    graphs = core.runner.graphs
    core.close()
    return {
        "ready_seconds": ready,
        "workloads": results,
        "decode": decode,
        "prefill_flops_per_second": flops,
        "prefill_share_of_product": flops / machine["product_flops_per_second"],
        "steps_replayed": graphs.replayed if graphs is not None else 0,
    }


def bench_transformers(folder: Path, rounds: int, tick: Any, device: str = "cuda") -> dict[str, Any]:
    """Return the results of the same workloads by ``generate`` of transformers, as one static batch."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def generate(ids: Ids, tokens: int) -> Ids:
        made = model.generate(
            torch.tensor(ids, device=device),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers: Ids = made[:, len(ids[0]) :].tolist()
        return answers

    return measure(generate, OFFLINE, rounds, 0, config.vocab_size, tick)


def setting(text: str) -> tuple[str, str]:
    """``name=value`` of --set."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("give a setting as NAME=VALUE")
    return name.replace("-", "_"), value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default: all")
    made.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    made.add_argument("--context", type=int, default=1024, help="prompt tokens of decoding rows")
    made.add_argument("--tokens", type=int, default=128, help="measured decode steps")
    made.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens in one step")
    made.add_argument(
        "--set", action="append", type=setting, default=[], help="setting of the engine, NAME=VALUE"
    )
    made.add_argument("--transformers", action="store_true", help="measure transformers too")
    made.add_argument("--json", type=Path, help="write everything to this file")
    return made


def report(name: str, found: dict[str, Any]) -> None:
    """Print the main figures of a model."""
    for who in ("weft", "transformers"):
        if who in found:
            results = found[who].get("workloads", found[who])
            line = "  ".join(f"{one.name} {headline(one, results[one.name])}" for one in OFFLINE)
            print(f"{name:14} {who:13} {line}")
    for rows, step in found["weft"]["decode"].items():
        share = f"{step['share_of_bandwidth']:.0%} of the copy bandwidth"
        print(f"{name:14} decode {rows:>2}     {step['ms_per_step']:.2f} ms a step, {share}")
    rate = found["weft"]["prefill_flops_per_second"] / 1e12
    share = f"{found['weft']['prefill_share_of_product']:.0%} of a matrix product's"
    print(f"{name:14} prefill       {rate:.0f} TFLOP/s, {share}")


def title(found: dict[str, Any]) -> str:
    """Return the title of the result page."""
    return f"{found['ceilings']['device']}, torch {found['ceilings']['torch']}"


def page(found: dict[str, Any]) -> str:
    """Return the tables of a result."""
    ceiling = found["ceilings"]
    copied, multiplied = (
        ceiling[key] / 1e12 for key in ("copy_bytes_per_second", "product_flops_per_second")
    )
    return (
        f"A copy moves {copied:.2f} TB/s (read and written), a product of bfloat16 reaches {multiplied:.0f} "
        "TFLOP/s.\n\n"
        f"{model_table(found['models'])}\n\n"
        "Products of one layer of llama-3-8b, microseconds (times as fast as bfloat16), by rows:\n\n"
        f"{gpu_products.table(found['products'])}"
    )


def main() -> None:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a CUDA GPU, and this torch sees none")
    found: dict[str, Any] = {"ceilings": ceilings(10), "settings": dict(args.set), "models": {}}
    print(json.dumps(found["ceilings"]))
    with tempfile.TemporaryDirectory() as scratch, tqdm(unit="part") as bar:

        def tick(what: str, _: object = None) -> None:
            bar.set_description(what)
            bar.update()

        found["products"], _ = gpu_products.measure(gpu_products.OURS, gpu_products.ROWS, float("inf"), tick)
        print(gpu_products.table(found["products"]))
        for name in args.model or MODELS:
            folder = model_folder(name, Path(scratch))
            model = {"weft": bench_weft(folder, found["ceilings"], args, tick)}
            torch.cuda.empty_cache()
            if args.transformers:
                model["transformers"] = bench_transformers(folder, args.rounds, tick)
                torch.cuda.empty_cache()
            found["models"][name] = model
            report(name, model)
            if args.json:
                record.write(args.json, "bench.gpu", title(found), page(found), found)


if __name__ == "__main__":
    main()
