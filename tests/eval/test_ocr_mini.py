"""The ocr-mini task: held-out lines stay held out, drawings are fixed, and answers are scored correctly."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools

import numpy as np
import pytest
from PIL import Image

from weft.eval.ocr_mini import (
    ALPHABET,
    HEIGHT,
    MARGIN,
    PROMPTS,
    TEST_LENGTHS,
    WIDTH,
    Line,
    data_url,
    draw,
    is_right,
    lines,
    messages,
    ocr_test_set,
)

TRAIN_COUNT = 20_000
LINE = Line("0O1I8B", PROMPTS[0], (128, 128), 0, 255)


@pytest.fixture(scope="module")
def train() -> list[Line]:
    """The first lines of one training stream, of the test's lengths."""
    return list(itertools.islice(lines("train", 0), TRAIN_COUNT))


def test_lines_of_the_test_set_never_occur_in_training(train: list[Line]) -> None:
    asked = {line.text for line in ocr_test_set()}
    assert len(asked) == 500
    assert not asked & {line.text for line in train}
    assert {len(text) for text in asked} == set(range(TEST_LENGTHS[0], TEST_LENGTHS[1] + 1))
    assert set("".join(asked)) == set(ALPHABET)


def test_short_lines_are_divided_too() -> None:
    """Short lines are divided too, so training and test lines never coincide."""
    shown = {line.text for line in itertools.islice(lines("train", 0, (1, 2)), 5000)}
    asked = {line.text for line in itertools.islice(lines("test", 0, (1, 2)), 500)}
    assert not shown & asked


def test_every_line_fits_into_its_image(train: list[Line]) -> None:
    for line in [*train[:500], *ocr_test_set(), Line("WWWWWWWWWW", PROMPTS[0], (256, 256), 0, 255)]:
        pixels = np.asarray(draw(line))
        assert pixels.shape == (HEIGHT, WIDTH)
        inked = pixels != line.paper
        assert inked.any()
        for edge in (inked[:MARGIN], inked[-MARGIN:], inked[:, :MARGIN], inked[:, -MARGIN:]):
            assert not edge.any()


def test_like_characters_are_drawn_differently() -> None:
    for one, other in ("0O", "1I", "8B", "5S", "2Z"):
        pair = [np.asarray(draw(Line(text, PROMPTS[0], (0, 0), 0, 255))) for text in (one, other)]
        assert np.abs(pair[0].astype(int) - pair[1].astype(int)).sum() > 1000


def test_same_seed_same_lines(train: list[Line]) -> None:
    assert list(itertools.islice(lines("train", 0), 50)) == train[:50]
    assert list(itertools.islice(lines("train", 1), 50)) != train[:50]
    assert ocr_test_set(20) == ocr_test_set(500)[:20]


def test_digests_are_pinned(train: list[Line]) -> None:
    """A change means that published scores are no longer comparable."""
    made = [hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in (ocr_test_set(), train[:1000])]
    assert made == ["4ad6deef80cbdb39", "458ec03f78e80603"]


def test_a_question_is_an_image_and_a_text() -> None:
    (message,) = messages(LINE)
    image, text = message["content"]
    assert text == {"type": "text", "text": LINE.prompt}
    kind, _, body = image["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert image["image_url"]["url"] == data_url(LINE)
    shown = Image.open(io.BytesIO(base64.b64decode(body)))
    assert (shown.mode, shown.size) == ("RGB", (WIDTH, HEIGHT))
    assert np.array_equal(np.asarray(shown)[:, :, 0], np.asarray(draw(LINE)))


@pytest.mark.parametrize(
    ("answer", "right"),
    [("0O1I8B", True), (" 0O1I8B\n", True), ("O01I8B", False), ("0O1I8B.", False), ("", False)],
)
def test_an_answer_is_the_line(answer: str, right: bool) -> None:
    assert is_right(answer, LINE) is right
