"""Drive OpenVINO GenAI in its own interpreter through ``ContinuousBatchingPipeline``.

``args``: ``folder``, the exported model, and ``properties`` of the CPU plugin beyond threads.
"""

from __future__ import annotations

from typing import Any

import numpy
import openvino
import openvino_genai
import protocol


class OpenVino:
    """Run OpenVINO's continuous batching. Prefix caching is off, so that every prompt is computed."""

    def load(self, options: dict[str, Any]) -> str:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB, as vLLM is given
        scheduler.max_num_seqs = options["max_seqs"]
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": options["threads"], **options["args"]["properties"]}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["args"]["folder"], scheduler, "CPU", properties
        )
        return openvino_genai.__version__

    def run(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = output_tokens
        settings.min_new_tokens = output_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        asked = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        answers = self.pipeline.generate(asked, [settings] * len(asked))
        return [list(answer.m_generation_ids[0]) for answer in answers]

    def close(self) -> None:
        del self.pipeline


if __name__ == "__main__":
    protocol.serve(OpenVino())
