"""A conversation with images through ``LLM``: the tokens of the prompt and the answers, for each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from tests.models.conftest import _randomize
from tests.support.whole_image_models import CASES, PROCESSORS
from tests.text.test_image_tokens import KINDS, LOOP, write_folder
from weft import LLM, SamplingParams
from weft.config.families import load_spec
from weft.text.tokenizer import Tokenizer


def _save(folder: Path, name: str) -> None:
    """Save a model whose ids are those of the tokenizer in ``folder``."""
    shown, placeholder, start, end, _ = KINDS[name][0]
    added = Tokenizer.load(folder).added
    family, settings = CASES[name]
    text = {**settings["text_config"], "vocab_size": 410}
    ids: dict[str, Any] = {"image_token_index": added[placeholder], "image_token_id": added[placeholder]}
    for one, token in (("boi", start), ("eoi", end)):
        ids |= {f"{one}_token_{kind}": added.get(token) for kind in ("id", "index")}
    known = {key: value for key, value in ids.items() if key in settings}
    config = getattr(transformers, f"{family}Config")(**{**settings, **known, "text_config": text})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    _randomize(model, 3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    (folder / "chat_template.jinja").write_text(LOOP % shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
def test_a_conversation_with_images(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, name)
    _save(tmp_path, name)
    spec = load_spec(str(tmp_path))
    assert spec.vision is not None
    media = spec.vision.media
    noise = np.random.default_rng(1).integers(0, 256, (2, 30, 50, 3), np.uint8)
    answers: list[Any] = []
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "64M"}
    llm = LLM(str(tmp_path), max_model_len=256, max_num_seqs=4, block_size=8, **settings)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    try:
        for pixels in (noise[0], noise[1], noise[0]):
            content = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "What?"}]
            messages: Any = [{"role": "user", "content": content}]
            (made,) = llm.chat(messages, params, use_tqdm=False)
            answers.append(made)
    finally:
        llm.shutdown()
    ids = list(answers[0].prompt_token_ids)
    fit = media.grid_of(30, 50)
    gaps = fit.grid[1] // media.merge if media.row_end is not None else 0
    assert ids.count(media.placeholder) == fit.tokens - gaps
    assert answers[0].outputs[0].token_ids == answers[2].outputs[0].token_ids
    first = [next(iter(made.outputs[0].logprobs[0].values())).logprob for made in answers]
    assert first[0] == pytest.approx(first[2], abs=1e-4)
    assert first[0] != pytest.approx(first[1], abs=1e-3)
    assert answers[2].num_cached_tokens > 0
