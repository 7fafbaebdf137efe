"""Drive vLLM's CPU build in its own interpreter through the ``LLM`` class. ``args`` are keywords of
``LLM``.
"""

from __future__ import annotations

import os
from typing import Any

import protocol


class Vllm:
    """Run vLLM with its CPU defaults. Prefix caching is off, so that every prompt is computed."""

    def load(self, options: dict[str, Any]) -> str:
        os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        import vllm

        self.params = vllm.SamplingParams
        self.llm = vllm.LLM(
            options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_len"],
            max_num_seqs=options["max_seqs"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            # The default of 0.92 is refused while other engines of the comparison hold memory.
            **{"gpu_memory_utilization": 0.4, **options["args"]},
        )
        return vllm.__version__

    def run(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = self.params(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self.llm


if __name__ == "__main__":
    protocol.serve(Vllm())
