"""Measure the cost of transformers' implementation beside Weft's own, in CPU seconds of one Llama.

    python -m bench.generic_cost [--layers 8] [--hidden 512] [--dtype float32] [--rounds 3]

Makes a random Llama, and alternates the same requests between ``--model-impl weft`` and ``transformers``, in
one thread. Prints CPU milliseconds per decode step and per prompt, and their ratios. Needs weft[models].
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
import transformers

from weft import LLM, SamplingParams
from weft.bench.bench_tokenizer import write_tokenizer

VOCABULARY, PROMPT, STEPS = 2048, 512, 48


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Save a random Llama with heads of 64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=2048,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY, 2048)


def spent(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Return the CPU milliseconds that ``llm`` takes for ``tokens`` tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.process_time()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return 1000 * (time.process_time() - began)


def measure(llm: LLM, number: int) -> dict[str, float]:
    """Return CPU milliseconds per decode step of 1 and 8 rows, and per prompt of 512 tokens.

    ``number`` makes prompts that no earlier call has cached.
    """
    made = dict[str, float]()
    for rows in (1, 8):
        prompts = [[3 + (7 * i + number) % 2000] * 8 for i in range(rows)]
        first = spent(llm, prompts, 2)
        made[f"decode, {rows} rows"] = (spent(llm, prompts, STEPS + 2) - first) / STEPS
    prompt = [3 + (5 * j + 31 * number) % 2000 for j in range(PROMPT)]
    made["prefill, 512 tokens"] = spent(llm, [prompt], 1)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    make_model(folder, given.layers, given.hidden)
    limits = {"max_model_len": 1024, "kv_cache_memory": "64MiB", "max_num_batched_tokens": 1024}
    engines = {
        impl: LLM(str(folder), dtype=given.dtype, model_impl=impl, enable_prefix_caching=False, **limits)
        for impl in ("weft", "transformers")
    }
    best = dict[tuple[str, str], float]()
    for number in range(given.rounds + 1):
        for impl, llm in engines.items():
            for what, value in measure(llm, number).items():
                if number:  # the first round captures steps
                    best[impl, what] = min(value, best.get((impl, what), value))
    for llm in engines.values():
        llm.shutdown()
    shutil.rmtree(folder)
    print(f"Llama, {given.layers} layers x {given.hidden}, {given.dtype}, CPU ms, best of {given.rounds}")
    for what in dict.fromkeys(what for _, what in best):
        own, other = best["weft", what], best["transformers", what]
        print(f"{what:22} weft {own:8.2f}  transformers {other:8.2f}  ratio {other / own:.2f}")


if __name__ == "__main__":
    main()
