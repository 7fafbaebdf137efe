"""``weft verify --tp / --dp / --ep / --overlap``: several ranks must give the tokens of one process.

Both sides are real engines in float64, and ranks are real processes. Greedy and seeded requests run together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from weft.api.llm import LLM
from weft.cli.options import keywords
from weft.cli.verify.tiny import FAMILIES, write_family
from weft.cli.verify.verify_run import make_prompts
from weft.config.families import load_spec
from weft.config.hub import bundled_models, resolve_model_path
from weft.config.resolve import resolve
from weft.config.sections.all import Config, ParallelSection
from weft.types.messages import EngineStats
from weft.types.sampling import SamplingParams

Say = Callable[[str], Any]

TOKENIZER = "spool-text"
"""Tokenizer for tiny models, which have no tokenizer."""


def several(config: Config) -> bool:
    """Return True if the configuration has more than one rank."""
    parallel = config.parallel
    return parallel.tensor_parallel_size * parallel.data_parallel_size > 1


def against_one_process(config: Config, count: int, tokens: int, say: Say) -> bool:
    """Compare the tokens of ``config``'s layout with those of one process; report with ``say``.

    Return True if all tokens are equal and all requested features took part. Runs two engines, one after the
    other.
    """
    # In float64 rounding hardly ever decides between tokens, so a difference counts as a defect.
    doubles = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float64"))
    alone = msgspec.structs.replace(doubles, parallel=ParallelSection())
    prompts = make_prompts(resolve(alone), count, tokens)
    expected, _ = _answers(alone, prompts, tokens)
    found, stats = _answers(doubles, prompts, tokens)
    wrong = [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
    say(f"{_described(config)}: {len(prompts) - len(wrong)} of {len(prompts)} prompts equal ({_done(stats)})")
    for number in wrong:
        mine = found[number]
        one = expected[number]
        at = next((i for i, (a, b) in enumerate(zip(mine, one, strict=False)) if a != b), len(mine))
        say(f"prompt {number} differs from token {at}: {mine[at : at + 4]}, one process {one[at : at + 4]}")
    missing = _missing(doubles, stats)
    for what in missing:
        say(f"{what} did NOT ENGAGE, so the comparison proves nothing; give more --prompts or --tokens")
    return not wrong and not missing


def families(config: Config, names: Iterable[str], count: int, tokens: int, say: Say) -> bool:
    """Run ``against_one_process`` for a tiny random model of each family in ``names``; report with ``say``.

    Return True if all pass. Families that cannot run the layout are skipped.
    """
    good = True
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        for name in names:
            path = write_family(Path(folder), name)
            # Families without experts cannot run with expert parallelism.
            if config.parallel.enable_expert_parallel and load_spec(str(path), None).moe is None:
                say(f"-- {name}: has no experts to divide")
                continue
            model = msgspec.structs.replace(config.model, **tiny_model(path))
            say(f"-- {name} ({FAMILIES[name][0]}, random weights)")
            good = (
                against_one_process(msgspec.structs.replace(config, model=model), count, tokens, say) and good
            )
    return good


def tiny_model(path: Path) -> dict[str, Any]:
    """Return the model settings for a family in the folder ``path``, written by ``write_family``."""
    assert TOKENIZER in bundled_models()
    tokenizer = resolve_model_path(TOKENIZER, None)
    return {"model": str(path), "tokenizer": tokenizer, "load_format": "dummy", "max_model_len": 512}


def _answers(config: Config, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], EngineStats]:
    """Return (tokens of every prompt, counters) of an engine, ended afterwards.

    All prompts run together; every second is sampled.
    """
    params = [
        # Even prompts are greedy, odd prompts are sampled with a fixed seed.
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=tokens, ignore_eos=True)
        for number in range(len(prompts))
    ]
    with LLM(**keywords(config)) as llm:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.stats()


def _described(config: Config) -> str:
    """Return the layout as text."""
    parallel = config.parallel
    parts = [f"tp {parallel.tensor_parallel_size}", f"dp {parallel.data_parallel_size}"]
    if parallel.enable_expert_parallel:
        parts.append(f"experts over all ranks ({parallel.moe_dispatch})")
    return f"{', '.join(parts)}, overlap {parallel.overlap}"


def _done(stats: EngineStats) -> str:
    """Return the step counters as text."""
    return f"{stats.steps} steps, {stats.mixed_steps} mixed, {stats.overlapped_steps} in two micro-batches"


def _missing(config: Config, stats: EngineStats) -> list[str]:
    """Return the requested features that took no part."""
    missing = []
    if config.parallel.overlap in ("prefill", "all") and not stats.overlapped_steps:
        missing.append(f"--overlap {config.parallel.overlap}")
    if config.speculation.speculative_method != "none" and not sum(stats.drafts):
        missing.append("--speculative-method")
    return missing
