"""The plots of the gsm-mini stories: the order of sentences and the arithmetic steps."""

from collections.abc import Callable

from weft.eval import gsm_templates as t
from weft.eval import gsm_words as words
from weft.eval.gsm_story import Impossible, Rng, Story

_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
_TIMES_VERB = {2: "[double|doubles|doubled]", 3: "[triple|triples|tripled]"}

# ---------------------------------------------------------------------- one person, one thing


def _open_running(s: Story) -> None:
    """Open with a first amount: given, a product of groups, or a sum.

    Every function of this module adds sentences and steps to the story, and raises Impossible if the draws do
    not fit.
    """
    roll = s.rng.below(100)
    if roll < (70 if s.max_steps == 1 else 60):
        s.value = s.amount()
        s.say(t.OPEN_HAS if s.rng.chance(0.65) else t.OPEN_GETS, a=s.value)
    elif roll < 90:
        a, b = s.factors()
        s.say(t.OPEN_GROUPS if roll < 80 else t.OPEN_RATE, a=a, b=b)
        s.step("x", a, b)
    else:
        a, b = s.amount(), s.more()
        s.say(t.OPEN_TWO, a=a, b=b)
        s.step("+", a, b)


def _gain(s: Story) -> None:
    """Add an amount to the running value. May raise Impossible."""
    b = s.more()
    last = (
        len(s.steps) + 1 == s.max_steps
    )  # no later sentence such as "and eats 3", which would have another subject
    s.say(t.GIVEN if last and s.rng.chance(0.3) else t.GAIN, b=b)
    s.step("+", s.value, b)


def _loss(s: Story) -> None:
    """Take an amount from the running value. May raise Impossible."""
    b = s.less()
    food = s.slots["item"] in words.FOODS
    s.say(t.GIVE if s.rng.chance(0.3) else t.EAT if food and s.rng.chance(0.6) else t.LOSS, b=b)
    s.step("-", s.value, b)
    s.lost = True


def _gain_groups(s: Story) -> None:
    before, (c, d) = s.value, s.factors(150)
    s.say(t.GAIN_GROUPS, c=c, d=d)
    s.step("+", before, s.step("x", c, d))


def _loss_each(s: Story) -> None:
    before, (c, d) = s.value, s.factors(s.value - 1)
    s.say(t.GIVE_EACH, c=c, d=d)
    s.step("-", before, s.step("x", c, d))
    s.lost = True


def _scale(s: Story) -> None:
    """Halve, double or triple the running value. May raise Impossible."""
    if s.rng.chance(0.5) and s.value % 2 == 0:
        s.say(t.HALF)
        s.step("/", s.value, 2)
        s.lost = True
    else:
        times = 2 if s.rng.chance(0.7) else 3
        s.say(t.MULTIPLY, times_verb=_TIMES_VERB[times])
        s.step("x", s.value, times)


def _finish_running(s: Story) -> bool:
    """End with a last step of another kind.

    Return False if no such step fits this story. May raise Impossible.
    """
    roll = s.rng.below(100)
    if roll < 45:
        divisors = [d for d in range(2, 13) if s.value % d == 0 and 2 <= s.value // d <= 50]
        if not divisors:
            return False
        b = s.rng.pick(divisors)
        s.say(t.SHARE, b=b)
        s.step("/", s.value, b)
    elif roll < 75:
        b = s.rng.between(2, 9)
        s.say(t.SELL_ALL, b=b)
        s.step("x", s.value, b)
    else:
        b = s.value + s.rng.between(2, 60)
        s.say(t.WANT, b=b)
        s.step("-", b, s.value)
    return True


def _running(s: Story) -> None:
    """Write a story of one person with one thing: gains, losses and a question. May raise Impossible."""
    _open_running(s)
    while len(s.steps) < s.max_steps:
        room, roll = s.max_steps - len(s.steps), s.rng.below(100)
        if room == 1 and roll < 35 and _finish_running(s):
            return
        if roll < 60:
            _gain(s)
        elif roll < 82:
            _loss(s)
        elif roll < 90:
            _scale(s)
        elif room >= 2:
            # These two need two steps: a product, then a sum or difference.
            (_gain_groups if s.rng.chance(0.5) else _loss_each)(s)
    s.say(t.ASK_LEFT if s.lost and s.rng.chance(0.3) else t.ASK_LOSS if s.lost else t.ASK_GAIN)


# ---------------------------------------------------------------------- comparisons and ages


def _relate(s: Story) -> None:
    """Relate the other person's amount to the first amount; the other amount becomes the running value.

    May raise Impossible.
    """
    a, roll = s.value, s.rng.below(100)
    if roll < 35:
        b = s.more()
        s.say(t.COMPARE_MORE, b=b)
        s.step("+", a, b)
    elif roll < 65:
        b = s.less()
        s.say(t.COMPARE_FEWER, b=b)
        s.step("-", a, b)
    elif roll < 88 or a % 2:
        times = s.rng.pick((2, 2, 3, 4, 5))
        s.say(t.COMPARE_TIMES, times=_TIMES[times])
        s.step("x", a, times)
    else:
        s.say(t.COMPARE_HALF)
        s.step("/", a, 2)


def _compare(s: Story) -> None:
    """Write a comparison of two persons' amounts.

    Raises Impossible for equal amounts, or groups of persons with a question of the difference.
    """
    a = s.value = s.amount()
    s.say(t.COMPARE_FIRST, a=a)
    if s.max_steps == 1 and s.rng.chance(0.5):
        b = s.amount()
        # Equal amounts would make the question of the difference ambiguous.
        if a == b:
            raise Impossible
        s.say(t.COMPARE_PLAIN, b=b)
        if s.rng.chance(0.5):
            s.say(t.ASK_BOTH)
            s.step("+", a, b)
        elif not s.plural:
            name, other = s.slots["Name"], s.slots["Other"]
            s.say(t.ASK_DIFFERENCE, High=name if a > b else other, Low=other if a > b else name)
            s.step("-", max(a, b), min(a, b))
        else:
            raise Impossible
        return
    _relate(s)
    if s.max_steps == 1:
        s.say(t.ASK_OTHER)
    else:
        s.step("+", a, s.value)
        s.say(t.ASK_BOTH)


def _age(s: Story) -> None:
    """Write a comparison of two ages, always with one step. Raises Impossible for a story of more steps."""
    if s.plural or s.max_steps > 1:
        raise Impossible
    s.past = False
    a = s.value = s.rng.between(6, 70)
    older = s.rng.chance(0.5)
    b = s.rng.between(2, 30) if older else s.less()
    s.say(t.AGE_FIRST, a=a)
    s.say(t.AGE_NEXT, b=b, older="older" if older else "younger")
    s.step("+" if older else "-", a, b)


# ---------------------------------------------------------------------- money


def _money(s: Story) -> None:
    """Write a story of money gained and spent. May raise Impossible."""
    if s.max_steps >= 2 and s.rng.chance(0.4):
        a, b = s.factors()
        s.say(t.MONEY_WAGE, a=a, b=b)
        s.step("x", a, b)
    else:
        s.value = s.amount()
        s.say(t.MONEY_OPEN, a=s.value)
    while len(s.steps) < s.max_steps:
        room, roll = s.max_steps - len(s.steps), s.rng.below(100)
        if roll < 35:
            b = s.more()
            s.say(t.MONEY_GAIN, b=b)
            s.step("+", s.value, b)
        elif roll < 75:
            b = s.less()
            s.say(t.MONEY_SPEND, b=b)
            s.step("-", s.value, b)
        elif room >= 2:
            before, (c, d) = s.value, s.factors(s.value - 1)
            s.say(t.MONEY_SPEND_EACH, c=c, d=d)
            s.step("-", before, s.step("x", c, d))
    s.say(t.ASK_MONEY)


def _cost(s: Story) -> None:
    """Write a story of a purchase, with the change as an optional second step.

    Raises Impossible for a story of more steps.
    """
    if s.max_steps > 2:
        raise Impossible
    a, b = s.factors(150)
    s.say(t.COST, a=a, b=b)
    cost = s.step("x", a, b)
    if s.max_steps == 1:
        s.say(t.ASK_PAY)
        return
    # Change is positive: the paid amount exceeds the cost.
    bills = [bill for bill in (20, 50, 100, 150, 200) if bill > cost]
    bill = bills[0] if s.rng.chance(0.6) else s.rng.between(cost + 1, cost + 60)
    s.say(t.CHANGE, b=bill)
    s.step("-", bill, cost)


# ---------------------------------------------------------------------- places and parts


def _place(s: Story) -> None:
    """Write a story of things brought to a place and taken away. May raise Impossible."""
    if s.max_steps >= 2 and s.rng.chance(0.4):
        a, b = s.factors()
        s.say(t.PLACE_ROWS, a=a, b=b)
        s.step("x", a, b)
    else:
        s.value = s.amount()
        s.say(t.PLACE_OPEN, a=s.value)
    while len(s.steps) < s.max_steps:
        # Each round gains or loses; the question may use "left" only after a loss.
        gain = s.rng.chance(0.5)
        b = s.more() if gain else s.less()
        s.say(t.PLACE_GAIN if gain else t.PLACE_LOSS, b=b)
        s.step("+" if gain else "-", s.value, b)
        s.lost |= not gain
    s.say(t.ASK_LEFT if s.lost and s.rng.chance(0.5) else t.ASK_PLACE)


def _parts(s: Story) -> None:
    """Write a story of a whole with two parts, always with one step.

    Raises Impossible for a story of more steps.
    """
    if s.max_steps > 1:
        raise Impossible
    place, x, y, whole = s.rng.pick(words.PARTS)
    slots = {"place": place, "x": x, "y": y, "whole": whole}
    a = s.value = s.amount()
    if s.rng.chance(0.5):
        b = s.more()
        s.say(t.PARTS_SUM, a=a, b=b, **slots)
        s.step("+", a, b)
    else:
        b = s.less()
        s.say(t.PARTS_REST, a=a, b=b, **slots)
        s.step("-", a, b)


_FAMILIES: tuple[tuple[int, Callable[[Story], None]], ...] = (
    (46, _running), (16, _compare), (3, _age), (13, _money), (8, _cost), (8, _place), (6, _parts),
)  # fmt: skip
_STEPS = (1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4)


def write_story(rng: Rng, held_out: bool, kind: type[Story] = Story) -> Story:
    """Return one story from the given side of the templates. Raises ``Impossible`` if the draws do not
    fit.
    """
    story = kind(rng, held_out, rng.pick(_STEPS))
    roll = rng.below(sum(weight for weight, _ in _FAMILIES))
    for weight, family in _FAMILIES:
        if roll < weight:
            family(story)
            break
        roll -= weight
    return story
