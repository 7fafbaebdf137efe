"""The gsm-mini task: held-out problems stay held out, and a seed gives the same problems everywhere."""

import hashlib
import itertools
import re

import pytest

from weft.eval import gsm_templates
from weft.eval.gsm_mini import Problem, extract_answer, is_held_out_pair, problems, score, test_set
from weft.eval.gsm_story import MAX_VALUE

TRAIN_COUNT = 20_000
_SUM = re.compile(r"(\d+) ([-+x/]) (\d+)")
_BRACKET = re.compile(r"\((\d+) \+ (\d+)\) / (\d+)")
_WORD = re.compile(r"[A-Za-z']+")


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    """The first ``TRAIN_COUNT`` problems of one training stream."""
    return list(itertools.islice(problems("train", 0), TRAIN_COUNT))


def _value(text: str) -> int:
    """The value of a member of a worked line: a number, ``a op b`` or ``(a + b) / c``, without remainder."""
    if bracket := _BRACKET.fullmatch(text):
        a, b, c = map(int, bracket.groups())
        assert a % c == b % c == 0
        return (a + b) // c
    if text.isdigit():
        return int(text)
    match = _SUM.fullmatch(text)
    assert match, text
    a, op, b = int(match[1]), match[2], int(match[3])
    assert op != "/" or a % b == 0
    return {"+": a + b, "-": a - b, "x": a * b, "/": a // b}[op]


def _digest(asked: list[Problem]) -> str:
    text = "\n".join(f"{p.question}\t{p.solution}\t{p.answer}\t{p.template_ids}\t{p.pairs}" for p in asked)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.slow
def test_templates_of_the_test_set_never_occur_in_training(train: list[Problem]) -> None:
    seen = {template for p in train for template in p.template_ids}
    asked = {template for p in test_set() for template in p.template_ids}
    assert len(asked) > 300
    assert not seen & asked
    assert all(gsm_templates.is_held_out_template(template) for template in asked)


@pytest.mark.slow
def test_every_test_problem_needs_a_number_pair_that_never_occurs_in_training(train: list[Problem]) -> None:
    seen = {pair for p in train for pair in p.pairs}
    assert not any(is_held_out_pair(*pair) for pair in seen)
    for p in test_set():
        assert any(pair not in seen and is_held_out_pair(*pair) for pair in p.pairs), p


@pytest.mark.slow
def test_pairs_list_every_sum_that_the_solution_shows(train: list[Problem]) -> None:
    for p in [*train[:2000], *test_set()]:
        lines = p.solution.split("\n")
        shown = {(op, int(a), int(b)) for line in lines for a, op, b in _SUM.findall(line.split(" = ")[0])}
        keys = {(op, *sorted((a, b))) if op in "+x" else (op, a, b) for op, a, b in shown}
        assert keys <= set(p.pairs)


def test_no_question_is_in_both_splits(train: list[Problem]) -> None:
    assert not {p.question for p in train} & {p.question for p in test_set()}


def test_every_word_of_the_test_set_occurs_in_training(train: list[Problem]) -> None:
    seen = {word for p in train for word in _WORD.findall(p.question)}
    assert {word for p in test_set() for word in _WORD.findall(p.question)} <= seen


def test_every_group_of_templates_has_both_sides() -> None:
    groups = [
        value for value in vars(gsm_templates).values() if isinstance(value, gsm_templates.TemplateGroup)
    ]
    assert len(groups) > 30
    for group in groups:
        assert len(group.train) >= 6, group.name
        assert len(group.test) >= 1, group.name


def test_solutions_are_right_and_in_range(train: list[Problem]) -> None:
    for p in [*train, *test_set()]:
        *lines, last = p.solution.split("\n")
        assert last == f"#### {p.answer}"
        assert 0 < p.answer <= MAX_VALUE
        assert 1 <= len(lines) <= 4
        for line in lines:
            assert len({_value(part) for part in line.split(" = ")}) == 1, line
        assert lines[-1].endswith(f"= {p.answer}")
        assert not set("{}[]|<>") & set(p.question)


def test_same_seed_same_problems(train: list[Problem]) -> None:
    assert list(itertools.islice(problems("train", 0), 50)) == train[:50]
    assert list(itertools.islice(problems("train", 1), 50)) != train[:50]
    assert len({p.question for p in test_set()}) == len(test_set()) == 500
    assert test_set(20) == test_set(500)[:20]


def test_digests_are_pinned(train: list[Problem]) -> None:
    """A change means that published accuracies are no longer comparable."""
    assert (_digest(test_set()), _digest(train[:1000])) == ("c46d4c8412dc5026", "85453ddec53a84db")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 + 7 = 19\n#### 19", 19),
        ("#### 3\nNo: #### 42", 42),
        ("####42<|im_end|>", 42),
        ("#### $1,250.", 1250),
        ("#### -7", -7),
        ("19", None),
        ("#### none", None),
        ("#### 5 and ####", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_score_counts_exact_answers() -> None:
    asked = test_set(3)
    assert score([asked[0].solution, "#### 100000", ""], asked) == 1
    with pytest.raises(ValueError, match="zip"):
        score([""], asked)
