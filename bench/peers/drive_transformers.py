"""Drive transformers in its own interpreter: ``static`` (padded batches by generate) or ``continuous``.

``{"load": {..., "args": {"mode": "static" | "continuous"}}}``
"""

from __future__ import annotations

from typing import Any

import protocol
import torch
import transformers


class Transformers:
    """Run the reference implementation in its usual form for batches: bf16, SDPA, no compilation."""

    def load(self, options: dict[str, Any]) -> str:
        torch.set_num_threads(options["threads"])
        self.mode = options["args"].get("mode", "static")
        self.max_seqs = options["max_seqs"]
        self.model = self._model(options["model"], getattr(torch, options["dtype"])).eval()
        # Without an end token every output has the exact length. A logits processor for the length would cost
        # time.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        return transformers.__version__

    def _model(self, folder: str, dtype: torch.dtype) -> Any:
        load = transformers.AutoModelForCausalLM.from_pretrained
        try:
            return load(folder, dtype=dtype, attn_implementation="sdpa")
        except ValueError as error:
            # SDPA does not support attention sinks.
            if "scaled_dot_product_attention" not in str(error):
                raise
            return load(folder, dtype=dtype, attn_implementation="eager")

    def run(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        if self.mode == "continuous":
            return self._continuous(prompts, output_tokens)
        made: list[list[int]] = []
        for start in range(0, len(prompts), self.max_seqs):
            made.extend(self._static(prompts[start : start + self.max_seqs], output_tokens))
        return made

    @torch.inference_mode()
    def _static(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        made = self.model.generate(ids, attention_mask=mask, max_new_tokens=output_tokens, do_sample=False)
        return made[:, width:].tolist()

    def _continuous(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        settings = transformers.GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        blocks = self.max_seqs * (1 + (max(map(len, prompts)) + output_tokens) // 256)
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=blocks,
            max_batch_tokens=2048,
            max_requests_per_batch=self.max_seqs,
            allow_block_sharing=False,
        )
        answers = self.model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=batching
        )
        order = sorted(answers, key=lambda name: int(name.rpartition("_")[2]))
        return [list(answers[name].generated_tokens) for name in order]

    def close(self) -> None:
        """Do nothing: the process ends."""


if __name__ == "__main__":
    protocol.serve(Transformers())
