"""An embedding model, whose checkpoint has no output head, embeds and refuses to generate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from weft import LLM
from weft.common.errors import InvalidRequest
from weft.config import hub


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model in the form of published embedding models: no ``model.`` prefix, no head, no
    tie.
    """
    target = tmp_path_factory.mktemp("headless") / "spool-embedding"
    shutil.copytree(hub.bundled_models()["spool-text"], target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(target / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, target / "model.safetensors")
    return target


def test_it_embeds_and_does_not_generate(headless: Path) -> None:
    texts = ["Tom has 3 pens.", "Ann buys"]
    with LLM() as whole, LLM(model=str(headless), dtype="float32") as llm:
        for pooling in ("last", "mean"):
            expected = whole.embed(texts, pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
            found = llm.embed(texts, pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one.embedding, other.embedding)
        with pytest.raises(InvalidRequest, match=r"no output head \(lm_head\)"):
            llm.generate(texts, use_tqdm=False)
        assert len(llm.embed(texts, use_tqdm=False)) == 2, "it goes on"


def test_requests_to_generate_are_bad_ones(headless: Path, start_weft: Any) -> None:
    server = start_weft("--model", str(headless))
    for path, body in (
        ("/v1/completions", {"prompt": "Tom", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tom"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "Tom", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Tom"}], "max_tokens": 4}),
    ):
        for stream in (False, True):
            answer = server.http.post(path, json={"model": server.model, "stream": stream, **body})
            assert answer.status_code == 400, (path, answer.text)
            assert "generates no text" in answer.json()["error"]["message"]
    answer = server.http.post("/v1/embeddings", json={"model": server.model, "input": "Tom"})
    assert answer.status_code == 200, answer.text
