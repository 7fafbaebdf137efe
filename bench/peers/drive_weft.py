"""Drive Weft in the repository's interpreter: an ``LLM`` in this process. ``args`` are keywords of
``LLM``.
"""

from __future__ import annotations

from typing import Any

import protocol


class Weft:
    """Run Weft with its defaults. Prefix caching is off, so that every prompt is computed."""

    def load(self, options: dict[str, Any]) -> str:
        import weft

        self.params = weft.SamplingParams
        settings = {
            "dtype": options["dtype"],
            "threads": options["threads"],
            "max_model_len": options["max_len"],
            "max_num_seqs": options["max_seqs"],
            "enable_prefix_caching": False,
            **options["args"],
        }
        self.llm = weft.LLM(options["model"], **settings)
        return weft.__version__

    def run(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = self.params(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        self.llm.shutdown()


if __name__ == "__main__":
    protocol.serve(Weft())
