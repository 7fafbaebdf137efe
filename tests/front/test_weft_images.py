"""A whole server with a vision model: the same tokens over HTTP as in Python, cached by content."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.pictures import data_url, image_file, image_part, video_part
from tests.support.seen import SeeingModels
from tests.support.servers import Running, Servers
from tests.support.text_folders import IMAGE_TEMPLATE, write_small_tokenizer
from tests.support.vision_models import END, PLACEHOLDER, START, VIDEO
from weft import LLM
from weft.common.errors import InvalidRequest
from weft.config.families import load_spec
from weft.config.sections.media_section import MediaSection
from weft.media.local import LocalPictures, placed
from weft.text.images import ImagePart
from weft.types.sampling import SamplingParams

A, B = image_file((40, 28), seed=1), image_file((40, 28), seed=2)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
pytestmark = pytest.mark.real_processes  # including a process that decodes images


def _model(root: Path, name: str) -> Path:
    """Write a model with a tokenizer and a template. Return its folder."""
    made = Path(SeeingModels(root).folder(name))
    tokens = {
        "<|image_pad|>": PLACEHOLDER,
        "<|video_pad|>": VIDEO,
        "<|vision_start|>": START,
        "<|vision_end|>": END,
    }
    write_small_tokenizer(made, tokens, IMAGE_TEMPLATE)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("seeing"), "qwen3-vl")


BODY = {
    "model": "seeing",
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""The request of ``GREEDY``, without messages."""
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "block_size": 4,
    "kv_cache_memory": "16M",
    "max_num_seqs": 8,
    "max_model_len": 256,
}


@pytest.fixture(scope="module")
def server(servers: Servers, folder: Path) -> Running:
    return _serve(servers, folder)


def _serve(servers: Servers, folder: Path) -> Running:
    flags = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]
    return servers.weft("--model", str(folder), "--served-model-name", "seeing", "--threads", "1", *flags)


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "ab"}, *parts]}]


@pytest.mark.requirement("F24")
def test_one_answer_however_an_image_comes(server: Running, folder: Path) -> None:
    with LLM(model=str(folder), **SETTINGS) as llm:
        (whole,) = llm.chat(asked(image_part(A), image_part(B)), GREEDY, use_tqdm=False)
        pictures = [{"type": "image", "image": Image.open(io.BytesIO(file))} for file in (A, B)]
        (opened,) = llm.chat(asked(*pictures), GREEDY, use_tqdm=False)
        (other,) = llm.chat(asked(image_part(B), image_part(A)), GREEDY, use_tqdm=False)
        vision = load_spec(str(folder)).vision
        assert vision is not None
        local = LocalPictures(vision.media, MediaSection())
        _, items = local.measured([ImagePart(Image.open(io.BytesIO(file)), "x") for file in (A, B)])
        ids = whole.prompt_token_ids
        starts = [i for i, token in enumerate(ids) if token == PLACEHOLDER and ids[i - 1] == START]
        prompt = {"prompt_token_ids": ids, "media": placed(items, starts)}
        (direct,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    wanted = whole.outputs[0].token_ids
    assert opened.prompt_token_ids == ids == other.prompt_token_ids
    assert ids.count(PLACEHOLDER) == sum(item.count for item in items)
    assert opened.outputs[0].token_ids == direct.outputs[0].token_ids == wanted
    answers = []
    for files in ((A, B), (A, B), (B, A), (A, A)):
        given = {**BODY, "messages": asked(*map(image_part, files))}
        answers.append(server.http.post("/v1/chat/completions", json=given).json())
    assert [answer["prompt_token_ids"] for answer in answers[:3]] == [list(ids)] * 3
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert tokens[:3] == [list(wanted), list(wanted), list(other.outputs[0].token_ids)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    first = ids.index(PLACEHOLDER)
    last = ids.index(END) + 1
    assert cached[0] == 0
    assert cached[1] > last + 4  # all but the last block
    assert cached[2] <= first  # equal tokens of another image
    assert first < cached[3] <= last + 4  # the first image is the same, the second one is not


def test_one_answer_however_a_video_comes(server: Running, folder: Path) -> None:
    frames = [image_file((20, 14), seed=n) for n in range(5)]
    with LLM(model=str(folder), **SETTINGS) as llm:
        (whole,) = llm.chat(asked(video_part(frames), image_part(A)), GREEDY, use_tqdm=False)
        opened = [Image.open(io.BytesIO(file)) for file in frames]
        mixed = {"type": "video", "video": [data_url(frames[0]), *opened[1:]]}
        (same,) = llm.chat(asked(mixed, image_part(A)), GREEDY, use_tqdm=False)
        (other,) = llm.chat(asked(video_part(frames[::-1]), image_part(A)), GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"video\[1\]: .*the same size"):
            llm.chat(asked({"type": "video", "video": [opened[0], Image.new("RGB", (9, 9))]}), GREEDY)
        with pytest.raises(InvalidRequest, match=r"video\[1\]: .*a Pillow image"):
            llm.chat(asked({"type": "video", "video": [opened[0], object()]}), GREEDY)
    ids, tokens = list(whole.prompt_token_ids), list(whole.outputs[0].token_ids)
    assert ids.count(START) == 5  # of a video and three groups, and of an image
    assert list(same.prompt_token_ids) == ids == list(other.prompt_token_ids)
    assert list(same.outputs[0].token_ids) == tokens != list(other.outputs[0].token_ids)
    cached = []
    for given in (frames, frames, [*frames[:2], *frames[::-1][:3]]):
        parts = asked(video_part(given), image_part(A))
        answer = server.http.post("/v1/chat/completions", json={**BODY, "messages": parts}).json()
        assert answer["prompt_token_ids"] == ids
        assert (answer["choices"][0]["token_ids"] == tokens) == (given is frames)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] > len(ids) - 8
    first, last = ids.index(VIDEO), len(ids) - 1 - ids[::-1].index(VIDEO)
    assert cached[0] < first < cached[2] < last  # the first group is the same


@pytest.mark.slow
def test_a_file_is_read_as_its_frames_are(server: Running, folder: Path) -> None:
    """A video file gives the tokens of the chosen frames as a list, in Python and over HTTP."""
    from tests.support.films import film, pictures
    from weft.media.decode import view
    from weft.media.media_messages import Target
    from weft.media.video import groups_of, header_of

    file = film(pictures(30, (32, 24)), rate=6)
    header = header_of(file, 1 << 20)
    numbers = [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]  # 2 frames per second
    whole = Target(height=24, width=32, canvas=(24, 32), resample=3, fingerprint=b"")
    frames = [
        Image.frombytes("RGB", (32, 24), pixels)
        for pixels in groups_of(file, header, [[number] for number in numbers], whole, 1 << 20)
    ]
    assert view(frames[0], whole) == frames[0].tobytes()
    times = [number / 6 for number in numbers]
    listed = {"type": "video", "video": frames, "timestamps": times}
    part = {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}}
    with LLM(model=str(folder), **SETTINGS) as llm:
        (due,) = llm.chat(asked(listed, image_part(A)), GREEDY, use_tqdm=False)
        (found,) = llm.chat(asked(part, image_part(A)), GREEDY, use_tqdm=False)
        (other,) = llm.chat(asked({**part, "num_frames": 4}, image_part(A)), GREEDY, use_tqdm=False)
        bad = {"type": "video", "video": data_url(b"no film here")}
        with pytest.raises(InvalidRequest, match=r"content\[1\]: the video has an unsupported format"):
            llm.chat(asked(bad), GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="allowed-media-domains"):
            llm.chat(asked({"type": "video", "video": "https://example.org/a.mp4"}), GREEDY, use_tqdm=False)
    ids, tokens = list(due.prompt_token_ids), list(due.outputs[0].token_ids)
    assert (list(found.prompt_token_ids), list(found.outputs[0].token_ids)) == (ids, tokens)
    assert ids.count(START) == 1 + 5 + 1
    assert list(other.prompt_token_ids).count(START) == 1 + 2 + 1
    parts = asked(part, image_part(A))
    answer = server.http.post("/v1/chat/completions", json={**BODY, "messages": parts}).json()
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == tokens


@pytest.mark.slow
def test_joined_groups_have_the_time_over_http(servers: Servers, tmp_path: Path) -> None:
    """Qwen2.5-VL: without text between groups only rope positions tell the rate of a video."""
    from tests.support.films import film, pictures

    folder = _model(tmp_path, "qwen2-5-vl")
    frames = [image_file((20, 14), seed=n) for n in range(7)]
    file = film(pictures(30, (32, 24)), rate=6)
    film_part = {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}}
    cases = [
        asked(video_part(frames, fps=2), image_part(A)),
        asked(video_part(frames, fps=0.2), image_part(A)),
        asked(film_part, video_part(frames[:3])),
        asked({**film_part, "fps": 0.8}),
    ]
    with LLM(model=str(folder), **SETTINGS) as llm:
        due = [llm.chat(one, GREEDY, use_tqdm=False)[0] for one in cases]
    assert due[0].prompt_token_ids == due[1].prompt_token_ids
    assert due[0].outputs[0].token_ids != due[1].outputs[0].token_ids
    server = _serve(servers, folder)
    for _ in range(2):  # the second round has prefix hits
        for one, expected in zip(cases, due, strict=True):
            given = {**BODY, "messages": one}
            answer = server.http.post("/v1/chat/completions", json=given).json()
            assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
            assert answer["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.requirement("F33")
def test_a_tenant_of_its_own_shares_nothing(server: Running) -> None:
    body = {"model": "seeing", "max_tokens": 2, "messages": asked(image_part(A))}
    cached = []
    for salt in ("one", "one", "two"):
        answer = server.http.post("/v1/chat/completions", json={**body, "cache_salt": salt}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


@pytest.mark.slow
def test_videos_of_averaged_frames(servers: Servers, tmp_path: Path) -> None:
    """Kimi K2.5: the media worker and the engine get groups of four frames, and a group of one."""
    from tests.text.test_averaged_videos import write_folder

    write_folder(tmp_path)
    frames = [image_file((20, 14), seed=n) for n in range(5)]
    with LLM(model=str(tmp_path), **SETTINGS) as llm:
        answers = [
            llm.chat(asked(video_part(given)), GREEDY, use_tqdm=False)[0]
            for given in (frames, frames[1:] + frames[:1])
        ]
    server = _serve(servers, tmp_path)
    given = {**BODY, "messages": asked(video_part(frames))}
    for cached in (False, True):
        made = server.http.post("/v1/chat/completions", json=given).json()
        assert made["prompt_token_ids"] == list(answers[0].prompt_token_ids)
        assert made["choices"][0]["token_ids"] == list(answers[0].outputs[0].token_ids)
        assert (made["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert answers[0].outputs[0].token_ids != answers[1].outputs[0].token_ids
    few = {**BODY, "messages": asked({"type": "video", "video": []})}
    refused = server.http.post("/v1/chat/completions", json=few)
    assert refused.status_code == 400
    assert "must be a part of the form" in refused.json()["error"]["message"]
