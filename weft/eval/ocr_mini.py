"""ocr-mini: read lines of text drawn into small images, exactly.

A line is random digits and capitals. A hash of the line puts one in ten lines on the test side, and training
never uses these lines. A seed fixes all draws. The pixels also depend on the versions of Pillow and of its
FreeType. Only drawing needs Pillow.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from weft.common.errors import ConfigError
from weft.eval.gsm_story import Rng
from weft.eval.gsm_templates import stable_hash

if TYPE_CHECKING:
    from PIL import Image, ImageFont

Split = Literal["train", "test"]

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPTS = ("Read the line.", "What does it say?", "What is written here?")
HELD_OUT_MODULUS = 10
TEST_SEED = 2026
TEST_LENGTHS = (4, 8)  # minimum and maximum characters
WIDTH, HEIGHT = 128, 32  # pixels
SIZE = 20  # font size in pixels
MARGIN = 1


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its drawing parameters and the question.

    ``place`` divides the free space to the left and above, in 256ths. ``ink`` and ``paper`` are grey levels.
    """

    text: str
    prompt: str
    place: tuple[int, int]
    ink: int
    paper: int


def is_held_out(text: str) -> bool:
    """Return True if a line belongs to the test side."""
    return stable_hash("ocr-mini line " + text) % HELD_OUT_MODULUS == 0


def lines(split: Split, seed: int, lengths: tuple[int, int] = TEST_LENGTHS) -> Iterator[Line]:
    """Yield lines of a split forever, in an order fixed by ``seed``. All lengths are equally likely."""
    rng = Rng(f"ocr-mini {split} {seed}")
    while True:
        text = "".join(rng.pick(ALPHABET) for _ in range(rng.between(*lengths)))
        place = (rng.below(257), rng.below(257))
        ink, paper = rng.between(0, 80), rng.between(176, 255)
        prompt = rng.pick(PROMPTS)
        if is_held_out(text) is (split == "test"):
            yield Line(text, prompt, place, ink, paper)


def ocr_test_set(n: int = 500) -> list[Line]:
    """Return the first ``n`` distinct lines of the fixed test set."""
    seen: dict[str, Line] = {}
    for line in lines("test", TEST_SEED):
        seen.setdefault(line.text, line)
        if len(seen) == n:
            break
    return list(seen.values())


@cache
def _font(size: int) -> "ImageFont.FreeTypeFont":
    """Return Pillow's built-in font. Raises ConfigError without Pillow, or without FreeType in Pillow."""
    try:
        from PIL import ImageFont
    except ImportError:
        raise ConfigError("drawing lines needs Pillow: pip install pillow") from None
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ConfigError("drawing lines needs a Pillow with FreeType (features.check('freetype2'))")
    return font


def draw(line: Line) -> "Image.Image":
    """Return the line as an image of ``WIDTH`` x ``HEIGHT`` in grey levels (mode L).

    Raises ConfigError without Pillow.
    """
    size = SIZE
    while True:
        font = _font(size)
        # Shrink the font until the line fits.
        left, top, right, bottom = font.getbbox(line.text)
        room_x, room_y = WIDTH - 2 * MARGIN - (right - left), HEIGHT - 2 * MARGIN - (bottom - top)
        if room_x >= 0 and room_y >= 0:
            break
        size -= 1
    from PIL import Image, ImageDraw

    image = Image.new("L", (WIDTH, HEIGHT), line.paper)
    x = MARGIN - left + int(room_x) * line.place[0] // 256
    y = MARGIN - top + int(room_y) * line.place[1] // 256
    ImageDraw.Draw(image).text((x, y), line.text, fill=line.ink, font=font)
    return image


def data_url(line: Line) -> str:
    """Return the image as a PNG in a ``data:`` URL."""
    made = io.BytesIO()
    draw(line).convert("RGB").save(made, format="PNG")
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def messages(line: Line) -> list[dict[str, Any]]:
    """Return the question for chat completions: the image, then the text."""
    image = {"type": "image_url", "image_url": {"url": data_url(line)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": line.prompt}]}]


def is_right(answer: str, line: Line) -> bool:
    """Return True if ``answer`` equals the line, except for white space around."""
    return answer.strip() == line.text
