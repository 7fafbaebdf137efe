"""Measure long contexts: decode and prefill at depth against the roofline of attention, and memory.

python -m bench.long --threads 2 --json bench/results/long-mine.json
python -m bench.long --models qwen3-dense-s --depths 8192,32768

A real engine with random weights runs one sequence at a time, in bf16, with chunks of 512 tokens. Each model
has a separate process. **The positions below a depth are not computed.** The engine plans and commits every
chunk of the prompt below the depth, but does not call the model, and the caches hold random numbers from the
start. From the depth on everything is computed: ``--chunks`` chunks of the prompt, then ``--tokens`` decode
steps. ``--whole N`` also computes a prompt of N tokens from its first token, as a check of the sum of chunks.

* ``added``: extra milliseconds per token compared with depth 0, i.e. the time of attention to the context.
* ``floor``: the roofline of ``added``, the larger of two times. The first is the extra cache bytes of a token
  at memory bandwidth (decode; the tokens of a chunk share the reads). The second is the extra operations at
  the rate of a matrix product (1024 x 1024 x 1024 in bf16). Both rates are measured in the same process just
  before (``bench.gemm``).
* ``share``: floor divided by added. Caches that fit in the CPU's cache may beat the floor.
* Memory: the peak resident set over all steps minus the resident set before the first step (weights loaded,
  caches full), beside the planned size of a step. Also the total, beside weights, caches and the planned
  size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import gemm, long_work, record
from bench.load import engine, request
from weft.bench.checkpoints import RECIPES, config_of
from weft.bench.plots import plot_depths, require_matplotlib
from weft.bench.process_memory import own_peak, own_resident, reset_own_peak
from weft.cli.verify.tiny import CHOSEN, COMPRESSED, SLIDING
from weft.config.sizing.memory import activation_bytes, weight_bytes
from weft.config.spec import DTYPE_BYTES
from weft.engine.core import EngineCore
from weft.types.plan import StepPlan

CHUNK = 512
LONGEST = 163_840
_SMALL = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 16}
_INDEX = {"index_n_heads": 8, "index_head_dim": 128}
#: Sparse models in small: entries and choices have the published sizes, heads and layers are fewer.
SPARSE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "deepseek-v32-s": (
        "deepseek-moe-k576",
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        {**_SMALL, "num_key_value_heads": 16, **_INDEX, "index_topk": 2048},
    ),
    "deepseek-v4-s": (
        "deepseek-moe-k576",
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        {
            **_SMALL,
            **_INDEX,
            "index_topk": 512,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "layer_types": [SLIDING, *[CHOSEN, COMPRESSED] * 3, CHOSEN],
            "mlp_layer_types": ["hash_moe", *["moe"] * 7],
            "compress_rates": {CHOSEN: 4, COMPRESSED: 128},
            "sliding_window": 128,
            "partial_rotary_factor": 0.125,
            "o_groups": 4,
            "o_lora_rank": 64,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
        },
    ),
}
MODELS = ("qwen3-dense-s", "deepseek-moe-s", "qwen3next-s", *SPARSE)


def write_config(folder: Path, name: str) -> Path:
    """Write the config.json of ``name`` with ``LONGEST`` positions into ``folder``. Return ``folder``."""
    if name in SPARSE:
        base, architecture, kind, more = SPARSE[name]
        config = {**config_of(base), **more, "architectures": [architecture], "model_type": kind}
    else:
        config = config_of(name)
    config["max_position_embeddings"] = LONGEST
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Engine:
    """Wrap an engine that skips the model below a depth. Record the durations of all other steps."""

    def __init__(self, folder: Path, threads: int, longest: int, **settings: Any) -> None:
        self.core: EngineCore = engine(
            str(folder),
            threads,
            load_format="dummy",
            dtype="bfloat16",
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            max_model_len=longest,
            steps_in_flight=1,
            **settings,
        )
        self.depth = 0
        """Number of skipped prompt positions, a multiple of ``CHUNK``."""
        self.prefill: list[float] = []
        """Seconds of each computed chunk."""
        self.decode: list[float] = []
        self._skips = False
        self._fill()
        self._wrap()
        reset_own_peak()
        self.filled = own_resident()
        """Bytes resident with weights and full caches, before the first step."""

    def _fill(self) -> None:
        """Fill all cache entries with random numbers. Leave recurrent states unchanged."""
        runner = self.core.runner.runner
        base = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
        states = {number for number, pool in enumerate(runner.kv.pools) if pool.cache.kind == "state"}
        for layer in runner.cache:
            for kind, tensors in layer.items():
                for tensor in () if kind in states else tensors:
                    for part in tensor.view(-1).split(len(base)):
                        part.copy_(base[: len(part)])

    def _wrap(self) -> None:
        runner, scheduler = self.core.runner.runner, self.core.scheduler
        model, forward, observe = runner._model, runner.forward, scheduler.observe
        steps = model.steps

        def skipping(batch: Any, *more: Any) -> Generator[Any, Any, torch.Tensor]:
            if self._skips:
                return torch.zeros(len(batch.logits_index), self.core.config.spec.vocab_size)
            made: torch.Tensor = yield from steps(batch, *more)
            return made

        def beginning(plan: StepPlan) -> Any:
            self._skips = bool(plan.prefill.rows and plan.prefill.start[0] < self.depth)
            return forward(plan)

        def listening(plan: StepPlan, seconds: float, unlike: bool = False) -> None:
            observe(plan, seconds, unlike)
            if plan.prefill.rows and not self._skips:
                self.prefill.append(seconds)
            elif plan.decode.rows and not unlike:
                self.decode.append(seconds)

        model.steps = skipping  # type: ignore[method-assign]
        runner.forward = beginning  # type: ignore[method-assign]
        scheduler.observe = listening  # type: ignore[method-assign]

    def run(self, depth: int, chunks: int, tokens: int) -> None:
        """Run a sequence whose prompt ends ``chunks`` chunks after ``depth``, and generate ``tokens`` tokens.

        Raise SystemExit if the number of computed chunks differs from ``chunks``.
        """
        self.depth = depth
        self.prefill, self.decode = [], []
        vocabulary = self.core.config.spec.vocab_size
        self.core.submit(request(depth, depth + chunks * CHUNK, tokens, vocabulary, random.Random(depth)))
        while self.core.has_work():
            self.core.step()
        if len(self.prefill) != chunks:
            raise SystemExit(f"{len(self.prefill)} chunks were computed, not {chunks}: the cut has changed")


def one(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of a model: rows by depth, limits, memory."""
    torch.set_num_threads(args.threads)
    bounds = gemm.limits(args.turns)
    longest = max(*args.depths, args.whole) + args.chunks * CHUNK + args.tokens
    before = own_resident()
    with tempfile.TemporaryDirectory() as folder:
        made = Engine(write_config(Path(folder), name), args.threads, longest)
    spec = made.core.config.spec
    made.run(0, 2, args.tokens)
    rows: list[dict[str, Any]] = []
    for depth in sorted({0, *args.depths}):
        made.run(depth, args.chunks, args.tokens)
        context = depth + args.chunks * CHUNK
        rows.append(
            {
                "model": name,
                "context": context,
                "decode_ms": 1e3 * statistics.median(made.decode),
                "prefill_ms": 1e3 * min(made.prefill) / CHUNK,
                "bytes": long_work.cache_bytes(spec, context, DTYPE_BYTES["bfloat16"]),
                "decode_flops": long_work.attention_flops(spec, context - 1, 1),
                "prefill_flops": long_work.attention_flops(spec, depth, CHUNK) / CHUNK,
            }
        )
    grown = own_peak() - made.filled
    config = made.core.config
    memory = {
        "before": before,
        "weights": weight_bytes(spec, "bfloat16"),
        "caches": sum(t.nbytes for t in long_work.cache_tensors(made.core.runner.runner.cache)),
        "step_planned": activation_bytes(spec, "bfloat16", config.scheduler),
        "step": grown,
        "peak": own_peak(),
    }
    against_floor(rows, bounds)
    whole = whole_prompt(made, args.whole) if args.whole else None
    made.core.close()
    return {"model": name, "limits": bounds, "memory": memory, "rows": rows, "whole": whole}


def against_floor(rows: list[dict[str, Any]], bounds: dict[str, float]) -> None:
    """Add to each row the extra time compared with the first row, and the roofline of the extra time."""
    first = rows[0]
    rates = {"bytes": bounds["read GB/s"] * 1e9, "flops": bounds["bf16 GFLOP/s"] * 1e9}
    for row in rows:
        for kind, tokens in (("decode", 1), ("prefill", CHUNK)):
            reading = (row["bytes"] - first["bytes"]) / tokens / rates["bytes"]
            computing = (row[f"{kind}_flops"] - first[f"{kind}_flops"]) / rates["flops"]
            row[f"{kind}_added_ms"] = row[f"{kind}_ms"] - first[f"{kind}_ms"]
            row[f"{kind}_floor_ms"] = 1e3 * max(reading, computing)


def whole_prompt(made: Engine, tokens: int) -> dict[str, float]:
    """Compute a whole prompt. Return its seconds, and the milliseconds per token of its last chunk."""
    made.run(0, tokens // CHUNK, 1)
    return {"tokens": tokens, "seconds": sum(made.prefill), "last_chunk_ms": 1e3 * made.prefill[-1] / CHUNK}


def share(row: dict[str, Any], kind: str) -> str:
    """Return floor divided by measured time as a percentage; "-" for the first depth."""
    added, floor = row[f"{kind}_added_ms"], row[f"{kind}_floor_ms"]
    return f"{floor / added:.0%}" if floor and added > 0 else "-"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return both tables as Markdown."""
    rows = [
        {
            "model": row["model"],
            "context": f"{row['context']:,}",
            "decode ms a token": f"{row['decode_ms']:.2f}",
            "added": f"{row['decode_added_ms']:.2f}",
            "floor": f"{row['decode_floor_ms']:.2f}",
            "share": share(row, "decode"),
            "prefill ms a token": f"{row['prefill_ms']:.3f}",
            "added ": f"{row['prefill_added_ms']:.3f}",
            "floor ": f"{row['prefill_floor_ms']:.3f}",
            "share ": share(row, "prefill"),
        }
        for one in found
        for row in one["rows"]
    ]
    memory = []
    for one in found:
        held = one["memory"]
        promised = held["before"] + held["weights"] + held["caches"] + held["step_planned"]
        memory.append(
            {
                "model": one["model"],
                "read GB/s": f"{one['limits']['read GB/s']:.1f}",
                "bf16 GFLOP/s": f"{one['limits']['bf16 GFLOP/s']:.0f}",
                "caches MB": f"{held['caches'] / 1e6:.0f}",
                "a step takes MB": f"{held['step'] / 1e6:.0f}",
                "planned for it MB": f"{held['step_planned'] / 1e6:.0f}",
                "peak MB": f"{held['peak'] / 1e6:.0f}",
                "promised MB": f"{promised / 1e6:.0f}",
            }
        )
    text = f"{record.markdown(rows)}\n\n{record.markdown(memory)}"
    for one in found:
        if one["whole"]:
            whole = one["whole"]
            text += (
                f"\n\n{one['model']}, all {whole['tokens']:,} tokens of a prompt computed: "
                f"{whole['seconds']:.1f} s, the last chunk {whole['last_chunk_ms']:.3f} ms a token."
            )
    return text


def apart(name: str) -> dict[str, Any]:
    """Run ``one`` in a separate process with the same arguments. Return the result."""
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.long", *sys.argv[1:], "--one", name]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800).stdout
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*(name for name in RECIPES if name != "qwen3vl-s"), *SPARSE)
    parser.add_argument("--models", default=",".join(MODELS), help=f"names of models: {', '.join(known)}")
    parser.add_argument("--depths", default="8192,32768,131072", help="positions, multiples of 512")
    parser.add_argument("--chunks", type=int, default=2, help="chunks computed at each depth")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded after the chunks")
    parser.add_argument(
        "--whole", type=int, default=0, help="also compute a whole prompt of this many tokens"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=20, help="repetitions of bandwidth and matrix products")
    parser.add_argument("--json", type=Path, help="file for the figures, with a .md and a .png beside")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.depths = [int(depth) for depth in args.depths.split(",")]
    if any(depth % CHUNK for depth in [*args.depths, args.whole]):
        parser.error(f"--depths and --whole must be multiples of {CHUNK}")
    names = args.models.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.one:
        print(json.dumps(one(args.one, args)))
        return
    if args.json:
        require_matplotlib()
    title = f"Long contexts: {args.threads} threads, bf16, chunks of {CHUNK}"
    found: list[dict[str, Any]] = []
    for name in names:
        found.append(apart(name))
        if args.json:  # write the partial results too
            numbers = {"threads": args.threads, "models": found}
            record.write(args.json, "bench.long", title, table(found), numbers)
            plot_depths({one["model"]: one["rows"] for one in found}, title, args.json.with_suffix(".png"))
    print(table(found))


if __name__ == "__main__":
    main()
