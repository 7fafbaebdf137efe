"""New weights of models that see images: no embedding of the old tower is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.new_weights import changed, read_tensors, write_checkpoint
from tests.support.pictures import image_file, image_part
from tests.support.seen import SeeingModels
from tests.support.slow import mostly_slow
from tests.support.text_folders import IMAGE_TEMPLATE, write_small_tokenizer
from tests.support.vision_models import END, PLACEHOLDER, START, VIDEO
from weft import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "block_size": 4,
    "kv_cache_memory": "16M",
    "max_num_seqs": 4,
    "max_model_len": 256,
}
TOKENS = {
    "<|image_pad|>": PLACEHOLDER,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = Path(SeeingModels(tmp_path).folder("qwen3-vl"))
    write_small_tokenizer(made, TOKENS, IMAGE_TEMPLATE)
    return made


def seen(llm: LLM) -> tuple[list[int], list[str]]:
    """Return tokens and logprobs about an image."""
    parts = [{"type": "text", "text": "ab"}, image_part(image_file((40, 28), seed=1))]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    one = output.outputs[0]
    return list(one.token_ids), [str(each) for each in one.logprobs]


@mostly_slow("what", ["visual", "language", ""], ["visual"])
def test_an_image_is_seen_with_the_new_weights(what: str, folder: Path, tmp_path: Path) -> None:
    """A part of the tensors, of the tower or of the text part, or all; then the first weights again."""
    old = read_tensors(folder)
    new = {name: tensor for name, tensor in changed(old, 1).items() if what in name}
    assert new
    with LLM(str(folder), **SETTINGS) as llm:
        before = seen(llm)
        assert seen(llm) == before
        encoded = llm.stats().images_encoded
        llm.update_weights(new.items(), partial=bool(what))
        after = seen(llm)
        assert after != before
        assert llm.stats().images_encoded == encoded + 1
        llm.update_weights(folder)
        assert seen(llm) == before
    with LLM(str(write_checkpoint(tmp_path / "new", folder, old | new)), **SETTINGS) as llm:
        assert seen(llm) == after
