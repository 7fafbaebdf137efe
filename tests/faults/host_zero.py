"""Host 0 of a group: ``python -m tests.faults.host_zero SETTINGS``; answers lines of input with tokens."""

from __future__ import annotations

import json
import sys

from weft import LLM, SamplingParams

PROMPTS = ["Tom has 12 apples", "Ann buys 7 more. " * 4, "Bob"]


def answers(llm: LLM, tokens: int = 60) -> list[list[int]]:
    """Return the model's greedy tokens for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def main() -> None:
    with LLM("spool-text", **json.loads(sys.argv[1])) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            told = answers(llm, int(line))
            print(json.dumps(told), llm.stats().recoveries, flush=True)


if __name__ == "__main__":
    main()
