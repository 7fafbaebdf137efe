"""Sample a token and print the imported costly parts of torch: ``python -m tests.api.sampled_once``."""

from __future__ import annotations

import sys

from weft import LLM, SamplingParams

if __name__ == "__main__":
    with LLM("spool-text", kv_cache_memory="64M") as llm:
        llm.generate("a", SamplingParams(max_tokens=2, temperature=1.0, top_k=5, seed=1), use_tqdm=False)
    print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
