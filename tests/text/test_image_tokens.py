"""Images in conversations of Gemma 3, Gemma 4 and Mistral Small 3.x: ids of the reference's processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from weft.bench.bench_tokenizer import write_tokenizer
from weft.common.errors import InvalidRequest
from weft.config.media import MediaFacts
from weft.text.chat import ChatFormat
from weft.text.image_tokens import expanded, image_rules
from weft.text.tokenizer import Tokenizer

LOOP = (
    "{%% for message in messages %%}<turn>{{ message.role }}\n"
    "{%% if message.content is string %%}{{ message.content }}{%% else %%}"
    "{%% for part in message.content %%}{%% if part.type == 'text' %%}{{ part.text | trim }}"
    "{%% elif part.type == 'image' %%}%s{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)
#: name -> (tokens: for an image in the template, placeholder, start, end, behind a row; fields of the facts)
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gemma3": (
        ("<start_of_image>", "<image_soft_token>", "<start_of_image>", "<end_of_image>", ""),
        {"kind": "fixed", "longest": 24, "around": "lines"},
    ),
    "gemma4": (
        ("<|image|>", "<|image|>", "<|image>", "<image|>", ""),
        {"kind": "budget", "budget": 70, "around": "tokens"},
    ),
    "mistral3": (
        ("[IMG]", "[IMG]", "", "[IMG_END]", "[IMG_BREAK]"),
        {"kind": "longest", "longest": 40},
    ),
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CONTENTS: list[list[dict[str, Any]]] = [
    [IMAGE, {"type": "text", "text": "What is it?\n"}],
    [{"type": "text", "text": "One:"}, IMAGE, {"type": "text", "text": "\nand two:"}, IMAGE],
]


def write_folder(folder: Path, name: str) -> None:
    """Write a tokenizer with the special tokens of a family."""
    write_tokenizer(folder, 400, 512)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    special = [*dict.fromkeys(text for text in KINDS[name][0] if text), "<turn>"]
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in KINDS:
        (root / name).mkdir()
        write_folder(root / name, name)
    return root


def _format(name: str, folder: Path) -> tuple[ChatFormat, MediaFacts]:
    (shown, placeholder, start, end, row_end), fields = KINDS[name]
    added = Tokenizer.load(folder).added
    facts = MediaFacts(
        patch=4,
        temporal=1,
        merge=2,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        placeholder=added[placeholder],
        start=added.get(start),
        end=added[end],
        shown=added[shown],
        row_end=added.get(row_end),
        **fields,
    )
    rules, hidden = image_rules(facts, 4)
    return ChatFormat(Tokenizer.load(folder, hidden), LOOP % shown, images=rules), facts


def _reference(name: str, image: int, grid: tuple[int, int, int], count: int) -> str:
    """Return the text of an image from the reference's processor."""
    _, placeholder, start, end, row_end = KINDS[name][0]
    if name == "gemma3":
        gemma3: Any = object.__new__(Gemma3Processor)
        gemma3.full_image_sequence = f"\n\n{start}{placeholder * count}{end}\n\n"
        return str(gemma3.replace_image_token({"num_crops": [0, 0]}, image))
    if name == "gemma4":  # this processor and the next need torchvision
        return f"{start}{placeholder * count}{end}"
    rows = [placeholder * (grid[2] // 2)] * (grid[1] // 2)
    return row_end.join(rows) + end


class Item(msgspec.Struct):
    """The tokens of an image, or of a part of an image."""

    count: int
    grid: tuple[int, int, int]
    number: int = 0
    front: tuple[int, ...] = ()


@pytest.mark.parametrize("number", range(len(CONTENTS)))
@pytest.mark.parametrize("name", list(KINDS))
def test_ids_are_the_reference_s(name: str, number: int, folders: Path) -> None:
    made, facts = _format(name, folders / name)
    prompt = made.encode([{"role": "user", "content": CONTENTS[number]}], add_generation_prompt=False)
    fits = [facts.grid_of(24, 40), facts.grid_of(17, 9)]
    items = [Item(fit.tokens, fit.grid) for fit in fits[: len(prompt.shown)]]
    ids, starts = expanded(prompt.ids, facts, items)

    text = "<turn>user\n"
    images = 0
    for part in CONTENTS[number]:
        if part["type"] == "text":
            text += part["text"].strip()
        else:
            text += _reference(name, images, items[images].grid, items[images].count)
            images += 1
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folders / name / "tokenizer.json"))
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    for start, item in zip(starts, items, strict=True):
        assert ids[start] == facts.placeholder
        inside = ids[start : start + item.count]
        gaps = item.grid[1] // 2 if facts.row_end is not None else 0
        assert inside.count(facts.placeholder) == item.count - gaps
        assert not gaps or inside[-1] == facts.end


@pytest.mark.parametrize("name", list(KINDS))
def test_text_cannot_spell_an_image(name: str, folders: Path) -> None:
    made, facts = _format(name, folders / name)
    spelled = "".join(KINDS[name][0])
    prompt = made.encode([{"role": "user", "content": f"a {spelled} b"}], add_generation_prompt=False)
    special = {facts.placeholder, facts.shown, facts.start, facts.end, facts.row_end}
    assert not special & set(prompt.ids)


def test_a_template_without_images_is_named(folders: Path) -> None:
    made, _ = _format("gemma3", folders / "gemma3")
    with pytest.raises(InvalidRequest, match="does not show the images"):
        ChatFormat(Tokenizer.load(folders / "gemma3"), LOOP % "", images=made._images).encode(
            [{"role": "user", "content": CONTENTS[0]}]
        )
