"""The instances that sequences can go to, and how loaded each of them is. Bookkeeping only.

Load is counted in sequences. One that is open counts 1, and its prompt's tokens count as further ones until
the prompt has been computed: so a head that reads a long prompt gets no other one meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROMPT_TOKENS = 256
"""Tokens of a prompt still to be computed that weigh as much as a running sequence."""


@dataclass(slots=True)
class Instance:
    """One head, as this front knows it."""

    number: int
    up: bool = False
    """Whether it takes sequences."""
    open: dict[int, int] = field(default_factory=dict)
    """This front's open sequences: prompt tokens that are still to be computed."""
    waiting_tokens: int = 0
    """The sum of ``open``."""
    chosen: int = 0
    """How often it was chosen."""

    @property
    def load(self) -> float:
        return len(self.open) + self.waiting_tokens / PROMPT_TOKENS


class Registry:
    """The instances 0, 1, .. of one front."""

    def __init__(self, count: int) -> None:
        self.instances = [Instance(number) for number in range(count)]
        self._home: dict[int, int] = {}

    def up(self) -> list[Instance]:
        """The instances that take sequences, in order."""
        return [instance for instance in self.instances if instance.up]

    def home(self, sequence: int) -> int | None:
        """Where an open sequence is."""
        return self._home.get(sequence)

    def begin(self, number: int, sequence: int, prompt_tokens: int) -> None:
        """``sequence`` goes to instance ``number``, from wherever it was."""
        self.end(sequence)
        instance = self.instances[number]
        self._home[sequence] = number
        instance.open[sequence] = prompt_tokens
        instance.waiting_tokens += prompt_tokens
        instance.chosen += 1

    def computed(self, sequence: int) -> None:
        """The prompt of ``sequence`` has been computed. Idempotent; unknown sequences are fine."""
        if (number := self._home.get(sequence)) is not None:
            instance = self.instances[number]
            instance.waiting_tokens -= instance.open[sequence]
            instance.open[sequence] = 0

    def end(self, sequence: int) -> None:
        """``sequence`` is no longer open. Idempotent; unknown sequences are fine."""
        if (number := self._home.pop(sequence, None)) is not None:
            instance = self.instances[number]
            instance.waiting_tokens -= instance.open.pop(sequence)
