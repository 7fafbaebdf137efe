"""The filter ``tojson`` of chat templates writes what transformers writes, for every argument."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from weft.text.marks import Marks, Word, secret_digits
from weft.text.template import ChatTemplate

VALUE: dict[str, Any] = {
    "zeta": {"b": [3, {"y": 1, "x": None}], "ä": "é\n\"'<&>", "a": {"2": 1.5, "10": True}},
    "Alpha": [],
    "object": {"start": 1, "im": 2, "end": {}},
    "你": "\u2028 \x7f 😀",
    "": -0.0,
    "_": 10**30,
}
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "ensure_ascii": ("true", "false"),
    "indent": ("none", "0", "2", "-1", "'\\t'", "true"),
    "separators": ("none", "(',', ':')", "[' ,', ' : ']"),
    "sort_keys": ("true", "false"),
}
COMBINATIONS = [
    ", ".join(f"{name}={value}" for name, value in zip(ARGUMENTS, values, strict=True))
    for values in itertools.product(*ARGUMENTS.values())
]
FORMS = (
    "v | tojson",
    "v | tojson(true, 1)",
    "v | tojson(false, none, (';', '='), true)",
    "[v, 1] | map('tojson', sort_keys=true) | join('/')",
    "v.items() | list | tojson(sort_keys=true)",
    "v | dictsort | tojson(indent=1)",
    *(f"v | tojson({one})" for one in COMBINATIONS),
)
SPECIAL = ("<|object_ref_start|>", "<|im_start|>", "<|im_end|>", "<|box_end|>", "[你]")
"""Special tokens around words of ``VALUE``: the words get marks."""
SPLIT = "|-|-|"


def _source() -> str:
    return SPLIT.join(f"{{{{ {form} }}}}" for form in FORMS)


def test_every_argument_is_that_of_transformers() -> None:
    chat = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="needs the package transformers"
    )
    texts, _ = chat.render_jinja_template(
        [[{"role": "user", "content": "a"}]], chat_template=_source(), v=VALUE
    )
    made = ChatTemplate(_source()).render({"v": VALUE})
    for form, ours, theirs in zip(FORMS, made.split(SPLIT), texts[0].split(SPLIT), strict=True):
        assert ours == theirs, form


def test_marks_of_special_tokens_move_no_key() -> None:
    mark = secret_digits()
    marked = Marks(SPECIAL).everywhere(VALUE, mark)
    assert {type(key) for key in marked} == {str, Word}, "the test needs words"
    made = ChatTemplate(_source()).render({"v": marked}).replace(mark, "")
    plain = ChatTemplate(_source()).render({"v": VALUE})
    for form, ours, wanted in zip(FORMS, made.split(SPLIT), plain.split(SPLIT), strict=True):
        assert ours == wanted, form


def test_dicts_in_iterators_are_sorted() -> None:
    made = ChatTemplate("{{ v | map(attribute='a') | tojson(sort_keys=true) }}")
    assert made.render({"v": [{"a": {"c": 1, "b": [2]}}]}) == '[{"b": [2], "c": 1}]'
