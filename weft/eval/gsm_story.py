"""The parts of a gsm-mini story: random draws, worked steps and the text. ``gsm_plots`` has the plots."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from weft.eval import gsm_templates as t
from weft.eval import gsm_words as words

Op = Literal["+", "-", "x", "/"]
T = TypeVar("T")

MAX_VALUE = 400  # no intermediate result or answer is larger


@dataclass(frozen=True, slots=True)
class Step:
    """One arithmetic step ``a op b``. Division is exact."""

    op: Op
    a: int
    b: int

    @property
    def result(self) -> int:
        """Value of the step."""
        if self.op == "+":
            return self.a + self.b
        if self.op == "-":
            return self.a - self.b
        return self.a * self.b if self.op == "x" else self.a // self.b

    def parts(self) -> "tuple[Step, ...]":
        """Return the additions that work out a product or quotient with two digits.

        6 x 14 = 60 + 24 = 84, and 84 / 6 = (60 + 24) / 6 = 10 + 4 = 14. Empty if the result needs no work.
        """
        # Split the larger factor (for a quotient: the result) into tens and ones.
        if self.op == "x":
            small, large = sorted((self.a, self.b))
            if small > 1 and large > 10 and large % 10:
                return (Step("+", small * (large - large % 10), small * (large % 10)),)
        if self.op == "/" and self.result > 10 and self.result % 10:
            ones = self.result % 10
            tens = self.result - ones
            return Step("+", tens * self.b, ones * self.b), Step("+", tens, ones)
        return ()

    def text(self) -> str:
        """Return the worked line, such as ``6 x 14 = 60 + 24 = 84``."""
        sums = [f"{part.a} + {part.b}" for part in self.parts()]
        if self.op == "/" and sums:
            sums[0] = f"({sums[0]}) / {self.b}"
        return " = ".join([f"{self.a} {self.op} {self.b}", *sums, str(self.result)])


class Impossible(Exception):
    """The drawn numbers do not fit. The caller draws a new problem."""


class Rng:
    """Random draws based only on ``random.Random.random``."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        """Return an integer in [0, n)."""
        return int(self._random.random() * n)

    def between(self, low: int, high: int) -> int:
        """Return an integer in [low, high]. Raises Impossible for an empty range."""
        if high < low:
            raise Impossible
        return low + self.below(high - low + 1)

    def chance(self, p: float) -> bool:
        """Return True with probability ``p``."""
        return self._random.random() < p

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of ``choices``."""
        return choices[self.below(len(choices))]


_PAST = {"has": "had", "owns": "owned", "collects": "collected", "buys": "bought", "finds": "found",
         "gives": "gave", "brings": "brought", "sends": "sent", "hands": "handed"}  # fmt: skip
_FORM = re.compile(r"\[([^|\]]*)\|([^|\]]*)(?:\|([^\]]*))?\]")


@dataclass
class Story:
    """A story in progress: text so far (without final stop), steps, templates used and running value."""

    rng: Rng
    held_out: bool
    max_steps: int
    text: str = ""
    value: int = 0
    steps: list[Step] = field(default_factory=list)
    template_ids: list[str] = field(default_factory=list)
    lost: bool = False  # True if something was given away: the question may then use "left"
    slots: dict[str, str] = field(default_factory=dict)
    plural: bool = False
    past: bool = False
    largest: int = MAX_VALUE

    def __post_init__(self) -> None:
        """Draw tense, persons and things of the story.

        Raises Impossible if both persons have the same name.
        """
        rng = self.rng
        self.past = rng.chance(0.4)
        name, subj = rng.pick(words.PEOPLE)
        self.plural = rng.chance(0.1)
        if self.plural:
            name, subj = rng.pick(words.GROUPS), "they"
        other = rng.pick(words.PEOPLE)[0]
        if other == name:
            raise Impossible
        item, container = (
            rng.pick(words.FOODS if rng.chance(0.45) else words.THINGS),
            rng.pick(words.CONTAINERS),
        )
        self.slots = {
            "Name": name, "name": name, "Other": other, "subj": subj, "Subj": subj.capitalize(),
            "obj": words.OBJECTIVE[subj], "poss": words.POSSESSIVE[subj],
            "item": item, "items": words.plural(item),
            "container": container, "containers": words.plural(container),
            **{present: past if self.past else present for present, past in _PAST.items()},
        }  # fmt: skip

    def say(self, group: t.TemplateGroup, **slots: int | str) -> None:
        """Append a sentence of ``group`` to ``text``, from this story's side (training or held out), and note
        the template's id.

        ``slots`` override the story's own slots.
        """
        template = self.rng.pick(group.test if self.held_out else group.train)
        text = template.text
        for key, value in (self.slots | {k: str(v) for k, v in slots.items()}).items():
            text = text.replace("{" + key + "}", value)
        self.text += _FORM.sub(self._form, text)
        self.template_ids.append(template.id)

    def _form(self, match: re.Match[str]) -> str:
        plural, singular, past = match.groups()
        if past is not None and self.past:
            return str(past)
        return str(plural if self.plural else singular)

    def step(self, op: Op, a: int, b: int) -> int:
        """Record a step, make its result the running value, and return the result.

        Raises Impossible for a result out of range.
        """
        step = Step(op, a, b)
        if not 0 < step.result <= self.largest:
            raise Impossible
        self.steps.append(step)
        self.value = step.result
        return step.result

    def question(self) -> str:
        """Return the finished text, with capitals and articles corrected."""
        text = self.text[0].upper() + self.text[1:]
        text = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
        return re.sub(r"(?<=[a-z,] )The (?=[a-z])", "the ", text)

    # numbers ------------------------------------------------------------

    def amount(self) -> int:
        """Return a first amount."""
        return self.rng.between(2, 20) if self.rng.chance(0.3) else self.rng.between(10, 99)

    def more(self) -> int:
        """Return an amount to gain."""
        return self.rng.between(2, 12) if self.rng.chance(0.35) else self.rng.between(5, 60)

    def less(self) -> int:
        """Return an amount to take from the running value. Raises Impossible if the value is too small."""
        return self.rng.between(2, min(self.value - 1, 12 if self.rng.chance(0.35) else 60))

    def factors(self, limit: int = MAX_VALUE) -> tuple[int, int]:
        """Return two factors, the smaller with one digit. Raises Impossible for a product above ``limit``."""
        small, large = self.rng.between(2, 9), self.rng.between(2, 25 if self.rng.chance(0.6) else 10)
        if small * large > limit:
            raise Impossible
        return (small, large) if self.rng.chance(0.5) else (large, small)
