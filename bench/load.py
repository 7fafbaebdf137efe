"""An engine and requests of random ids, for scripts that drive an engine step by step."""

from __future__ import annotations

import argparse
import random
from typing import Any

from weft.common.clock import SystemClock
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import TokenParams


def engine(model: str, threads: int, **settings: Any) -> EngineCore:
    """Return an engine. Prefix caching is off by default, so that repeated prompts are computed again."""
    settings.setdefault("enable_prefix_caching", False)
    return EngineCore(
        resolve(from_keywords({"model": model, "threads": threads, **settings})), clock=SystemClock()
    )


def request(number: int, prompt: int, tokens: int, vocabulary: int, rng: random.Random) -> Submit:
    """Return a request for sequence ``number``: ``prompt`` random ids, then ``tokens`` greedy tokens."""
    return Submit(
        sequence=number,
        request=number,
        seed=number,
        prompt_ids=ids_to_bytes([rng.randrange(vocabulary) for _ in range(prompt)]),
        params=TokenParams(temperature=0.0, max_tokens=tokens),
    )


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --threads and --seed."""
    parser.add_argument("--model", default="spool-text", help="bundled name, folder or hub name")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's default")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and of the order")
