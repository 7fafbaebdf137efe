"""Videos on separate encode, prefill and decode groups give the same answers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_encode import DECODE, ENCODE, MODEL, of_role, up
from tests.cli.test_serve import start
from tests.cli.test_up_roles import ends_in_order, metric
from tests.support.pictures import data_url, image_file, image_part, video_part
from tests.support.slowness import deadline
from tests.support.text_folders import IMAGE_TEMPLATE

__all__ = ["start"]

try:
    import av
except ImportError:
    av = None

FRAMES = [image_file((40, 24), seed=n) for n in range(7)]


@functools.cache
def _file_part() -> list[dict[str, Any]]:
    """Return a video file of 3 seconds: 6 frames in 3 groups. Made once: the encoder may write other bytes in
    another call."""
    from tests.support.films import film

    return [{"type": "video_url", "video_url": {"url": data_url(film(18, size=(40, 24)), "video/mp4")}}]


def _answers(base: str) -> list[tuple[str, int]]:
    """Text and prompt tokens of prompts with videos, and an image beside one."""
    contents = [
        [video_part(FRAMES[:5]), {"type": "text", "text": "Read the line."}],
        [image_part(FRAMES[5]), video_part(FRAMES[:4], fps=8), video_part(FRAMES[4:]), image_part(FRAMES[0])],
        [video_part(FRAMES[:6])],
        *([] if av is None else [_file_part()]),
    ]
    said = []
    for content in contents:
        body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": True}
        body["messages"] = [{"role": "user", "content": content}]
        answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=deadline(120))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        tokens = [one["token"] for one in found["choices"][0]["logprobs"]["content"]]
        said.append(("".join(tokens), found["usage"]["prompt_tokens"]))
    return said


@pytest.mark.slow
def test_the_same_answers_with_one_group_of_each_role(start: Any, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(IMAGE_TEMPLATE)
    front = f"{{chat-template: {template}}}"
    alone = start(*up(tmp_path, "{}", front=front), command="up")
    due = _answers(alone.url())
    assert of_role(alone.url(), "images_encoded_total", "unified")
    ends_in_order(alone)
    server = start(*up(tmp_path, ENCODE, "{role: prefill}", DECODE, front=front), command="up")
    base = server.url()
    assert _answers(base) == due
    assert len(set(due)) == (3 if av is None else 4)
    # Pairs (0 1), (2 3), (4) and (4 5), (6) of frames, the images 5 and 0, and in the last one (4 5) again.
    assert of_role(base, "images_encoded_total", "encode") == {"encode0": 7.0 if av is None else 10.0}
    assert set(of_role(base, "images_encoded_total", "prefill").values()) == {0.0}
    assert metric(base, "embedding_transfers_failed_total") == 0
    assert metric(base, "transfers_failed_total") == 0
    ends_in_order(server)
