"""Clients of a simulated cluster: their requests, and their behavior beside reading."""

from __future__ import annotations

import random
from dataclasses import dataclass

from testing.cluster.check import VOCABULARY
from weft.types.media_item import MediaItem
from weft.types.sampling import TokenParams

MOST_TRIES = 4
"""Maximum number of tries of a client."""


@dataclass(slots=True, kw_only=True)
class Client:
    """A client with one request."""

    number: int
    prompt: list[int]
    choices: int
    seed: int
    params: TokenParams
    at: float
    pinned: bool = False
    text_stops: dict[int, int]
    """Choice -> number of tokens after which the text side ends the choice."""
    pauses: tuple[tuple[float, float], ...] = ()
    """(seconds after the request, seconds without reading)."""
    leaves: float | None = None
    """Seconds after the request at which the client leaves; None if the client stays."""
    media: tuple[MediaItem, ...] = ()
    """The images of the prompt."""
    tries: int = 0
    outcome: str | None = None
    """End of the request: done, failed, left or refused; None while open."""


def random_client(rng: random.Random, number: int) -> Client:
    """Return a client with a random request. The request is short: a few tokens suffice for every failure."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 10))]
    if rng.random() < 0.3:
        prompt = [7] * len(prompt)
    choices = rng.choice((1, 1, 2, 3))
    stops = (rng.randrange(VOCABULARY),) if rng.random() < 0.3 else ()
    kind = rng.random()
    pauses: tuple[tuple[float, float], ...] = ()
    if kind < 0.2:
        pauses = ((rng.random() * 0.3, rng.random() * 0.3),)
        if rng.random() < 0.5:
            pauses += ((0.65 + rng.random() * 0.2, rng.random() * 0.1),)
    leaves = rng.random() * 0.5 if 0.2 <= kind < 0.3 else None
    if kind < 0.03:
        pauses = ((0.1, 60.0),)  # never reads, and leaves at last
        leaves = 3.0
    return Client(
        number=number,
        prompt=prompt,
        choices=choices,
        seed=rng.getrandbits(32),
        params=TokenParams(
            max_tokens=rng.randint(1, 8),
            stop_ids=stops,
            prompt_logprobs=0 if rng.random() < 0.25 else -1,
        ),
        at=0.45 + rng.random() * 0.6,
        pinned=rng.random() < 0.08,
        text_stops={0: rng.randint(1, 4)} if rng.random() < 0.2 else {},
        pauses=pauses,
        leaves=leaves,
    )
