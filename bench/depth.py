"""Output tokens a second with one and with two steps in flight, interleaved in one run.

python -m bench.depth --model spool-text --requests 32 --tokens 64
"""

from __future__ import annotations

import argparse
import statistics
import time

from weft import LLM, SamplingParams


def rate(llm: LLM, requests: int, prompt: int, tokens: int) -> float:
    """Output tokens a second of ``requests`` requests of ``prompt`` + ``tokens`` tokens."""
    vocabulary = llm.config.spec.vocab_size
    prompts = [
        {"prompt_token_ids": [(7 * i + 3 * j) % vocabulary for j in range(prompt)]} for i in range(requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return requests * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-text", help="bundled name, folder or hub name")
    parser.add_argument("--requests", type=int, default=32, help="requests at once")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="times that each variant runs")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    args = parser.parse_args()
    engines = {
        depth: LLM(
            args.model,
            steps_in_flight=depth,
            threads=args.threads,
            max_num_seqs=args.requests,
            enable_prefix_caching=False,
        )
        for depth in (1, 2)
    }
    rates: dict[int, list[float]] = {depth: [] for depth in engines}
    for turn in range(args.rounds + 1):
        for depth, llm in engines.items():
            made = rate(llm, args.requests, args.prompt, args.tokens)
            if turn:  # the first round warms up
                rates[depth].append(made)
    one, two = (statistics.median(rates[depth]) for depth in (1, 2))
    for depth, llm in engines.items():
        print(f"steps in flight {depth}: {statistics.median(rates[depth]):8.0f} tok/s   {rates[depth]}")
        llm.shutdown()
    print(f"two over one: {two / one:.2f}")


if __name__ == "__main__":
    main()
