"""``weft bench offline``: the workloads on ``LLM`` in this process, and a check for repeatable results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from weft.bench.process_memory import own_peak
from weft.bench.stats import rounded
from weft.bench.workloads import Workload, prompts, random_ids
from weft.common.errors import ConfigError, WeftError
from weft.types.sampling import SamplingParams

Ids = list[list[int]]
Generate = Callable[[Ids, int], Ids]
"""Function from (prompts, output tokens of each) to output ids."""


class Offline:
    """An engine in this process. ``load_seconds`` includes the import."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Load the engine. ``settings``: keywords of ``LLM``. Raise the errors of ``LLM``."""
        began = time.monotonic()
        from weft import LLM

        self._llm = LLM(**settings)
        self.load_seconds = time.monotonic() - began
        self.vocab_size = self._llm.config.spec.vocab_size
        self.facts = {"model": settings.get("model"), "dtype": self._llm.config.dtype}

    def generate(self, ids: Ids, output_tokens: int) -> Ids:
        """Generate greedily without end-of-text, and return the output ids. Raise WeftError if a request
        fails."""
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        for output in outputs:
            error = output.outputs[0].error
            if error is not None:
                raise WeftError(f"a request failed: {error.message}")
        return [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        self._llm.shutdown()


def check(workload: Workload) -> None:
    """Raise ConfigError for a workload that is only for servers."""
    if workload.concurrency is not None:
        raise ConfigError(
            f"{workload.name} requires a server: use weft bench serve --workload {workload.name}"
        )


def measure(
    generate: Generate,
    workloads: Sequence[Workload],
    rounds: int,
    repetition: int,
    vocab_size: int,
    tick: Callable[[str], Any] = lambda _: None,
) -> dict[str, Any]:
    """Return workload name -> result.

    Each workload runs ``rounds`` times by ``generate`` after one small warm-up. Every round has new prompts.
    ``tick`` is called with the name of each finished part. Raise WeftError for an output of the wrong length.
    """
    generate([random_ids(f"warm-up {n}", 32, vocab_size) for n in range(4)], 4)
    tick("warm-up")
    results: dict[str, Any] = {}
    for workload in workloads:
        seconds = []
        for number in range(rounds):
            ids = prompts(workload, repetition + number, vocab_size)
            began = time.perf_counter()
            made = generate(ids, workload.output_tokens)
            seconds.append(time.perf_counter() - began)
            # End-of-text is ignored, so a shorter output is an error, and would distort the rates.
            if any(len(one) != workload.output_tokens for one in made):
                raise WeftError(f"{workload.name}: an answer does not have the requested length")
            tick(workload.name)
        results[workload.name] = result(workload, seconds)
    return results


def result(workload: Workload, seconds: Sequence[float]) -> dict[str, Any]:
    """Return the results of a workload from the seconds of its rounds: the rounds, the median, and rates per
    second of the median round.

    ``ms_per_token`` is None for several requests.
    """
    # The median is robust against a single disturbed round.
    middle = statistics.median(seconds)
    output, prompt = (workload.requests * n for n in (workload.output_tokens, workload.prompt_tokens))
    found: dict[str, Any] = rounded(
        {
            "about": workload.about,
            "seconds": middle,
            "rounds": list(seconds),
            "output_tokens_per_second": output / middle,
            "prompt_tokens_per_second": prompt / middle,
            "ms_per_token": 1e3 * middle / workload.output_tokens if workload.requests == 1 else None,
        }
    )
    return found


def headline(workload: Workload, found: dict[str, Any]) -> str:
    """Return the main number of the workload, with its unit."""
    if workload.measure == "token_seconds":
        return f"{found['ms_per_token']:,.2f} ms/token"
    if workload.measure == "prompt_rate":
        return f"{found['prompt_tokens_per_second']:,.0f} prompt tok/s"
    return f"{found['output_tokens_per_second']:,.0f} output tok/s"


def identical(
    generate: Generate,
    workload: Workload,
    runs: int,
    alone: bool,
    repetition: int,
    vocab_size: int,
    tick: Callable[[str], Any] = lambda _: None,
) -> dict[str, Any]:
    """Run the same prompts ``runs`` times by ``generate``.

    Return a dict with the number of requests, and of the requests with other tokens than in the first run.

    With ``alone``, also run each prompt by itself, and count in the same way. ``tick`` is called after each
    run. Prefix caching stays as set in the engine: later runs compute less and must still give the same
    tokens. Raise WeftError if a request fails.
    """
    ids = prompts(workload, repetition, vocab_size)
    made = []
    for _ in range(runs):
        made.append(generate(ids, workload.output_tokens))
        tick("identical")
    found: dict[str, Any] = {
        "workload": workload.name,
        "runs": runs,
        "requests": len(ids),
        "requests_that_differ": differing(made),
    }
    if alone:
        single = []
        for one in ids:
            single += generate([one], workload.output_tokens)
            tick("alone")
        found["requests_that_differ_alone"] = differing([made[0], single])
    return found


def differing(runs: Sequence[Ids]) -> int:
    """Return the number of requests with other tokens in some run than in the first run."""
    return sum(any(run[number] != first for run in runs[1:]) for number, first in enumerate(runs[0]))


def report(engine: Offline, results: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the whole result as JSON data: settings, load seconds, peak memory in bytes, and ``results``."""
    return {
        **engine.facts,
        "settings": {name: str(value) for name, value in settings.items()},
        "load_seconds": round(engine.load_seconds, 3),
        "peak_memory": own_peak(),
        "workloads": results,
    }
