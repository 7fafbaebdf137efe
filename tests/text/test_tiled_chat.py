"""Conversations with images in tiles through ``LLM``: ids, and greedy tokens of the reference in float64."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor

from tests.config.test_tiles import SEPARATORS, llama4_pixels, png
from tests.models.conftest import _randomize
from tests.support.slow import mostly_slow
from tests.support.whole_image_models import CASES, PROCESSORS
from tests.text.test_image_tokens import LOOP
from weft import LLM, SamplingParams
from weft.bench.bench_tokenizer import write_tokenizer
from weft.config.families import load_spec
from weft.config.media import MediaFacts
from weft.text.tokenizer import Tokenizer

#: name -> (token for an image in the template, placeholder, start, end)
KINDS = {
    "internvl": ("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>"),
    "llama4": ("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
}
TOKENS = 9
SIZES = [(30, 50), (24, 24), (61, 13), (1, 100)]


def write_folder(folder: Path, name: str) -> None:
    """Write a model in float64 with the token ids of the written tokenizer, and a template."""
    write_tokenizer(folder, 400, 512)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    special = [*dict.fromkeys((*KINDS[name], *SEPARATORS)), "<turn>"]
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast.save(str(folder / "tokenizer.json"))
    shown, placeholder, start, end = KINDS[name]
    added = Tokenizer.load(folder).added
    family, settings = CASES[name]
    ids: dict[str, Any] = {"image_token_index": added[placeholder], "image_token_id": added[placeholder]}
    ids |= {"boi_token_index": added[start], "eoi_token_index": added[end]}
    known = {key: value for key, value in ids.items() if key in settings}
    text = {**settings["text_config"], "vocab_size": 416, "dtype": "float64"}
    config = getattr(transformers, f"{family}Config")(**{**settings, **known, "text_config": text})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).double()
    _randomize(model, 3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    # The published template of InternVL ends the line behind an image.
    written = "{{ '<IMG_CONTEXT>\\n' }}" if name == "internvl" else shown
    (folder / "chat_template.jinja").write_text(LOOP % written)


def reference(name: str, file: bytes, media: MediaFacts) -> tuple[str, torch.Tensor]:
    """Return the text of an image, and its pixel values, from the reference's processor."""
    _, placeholder, start, end = KINDS[name]
    processor: Any
    if name == "internvl":
        settings = {**PROCESSORS["InternVL"], "crop_to_patches": True}
        made = GotOcr2ImageProcessorPil(**settings)(Image.open(io.BytesIO(file)), return_tensors="pt")
        processor = object.__new__(InternVLProcessor)
        processor.image_token, processor.image_seq_length = placeholder, TOKENS
        processor.start_image_token, processor.end_image_token = start, end
        return processor.replace_image_token(made, 0) + "\n", made["pixel_values"]
    processor = object.__new__(Llama4Processor)
    pixels = llama4_pixels(file, media)
    image = Image.open(io.BytesIO(file))
    rows = {(30, 50): (2, 2), (24, 24): (1, 1), (61, 13): (3, 1), (1, 100): (1, 5)}[image.height, image.width]
    return processor._prompt_split_image(rows, TOKENS), pixels


def image_part(file: bytes) -> dict[str, Any]:
    return {"type": "image", "image": Image.open(io.BytesIO(file))}


@mostly_slow("name", list(KINDS), ["llama4"])
def test_ids_and_tokens_are_the_reference_s(name: str, tmp_path: Path) -> None:
    """One image, and several, of odd sizes; in chunks, and with prefix hits that end within an image."""
    write_folder(tmp_path, name)
    vision = load_spec(str(tmp_path)).vision
    assert vision is not None
    files = [png(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    seen = [reference(name, file, vision.media) for file in files]
    conversations = [[2], [0, 1, 3], [0, 2]]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float64
    ).eval()
    settings: dict[str, Any] = {
        "dtype": "float64",
        "device": "cpu",
        "kv_cache_memory": "64M",
        "block_size": 8,
    }
    settings |= {"max_num_batched_tokens": 24, "max_model_len": 512, "max_num_seqs": 4}
    hidden = vision.media.placeholder
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={hidden: -100})
    cached = []
    answers = set()
    with LLM(str(tmp_path), **settings) as llm:
        for chosen in conversations:
            content = [*(image_part(files[n]) for n in chosen), {"type": "text", "text": "What?"}]
            (made,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
            text = "<turn>user\n" + "".join(seen[n][0] for n in chosen) + "What?"
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert made.prompt_token_ids == ids
            pixels = torch.cat([seen[n][1] for n in chosen]).double()
            expected = greedy(model, ids, pixels, params.max_tokens or 0, hidden)
            assert list(made.outputs[0].token_ids) == expected
            answers.add(tuple(expected))
            cached.append(made.num_cached_tokens or 0)
    # The last conversation begins with the tiles of the conversation before.
    assert cached[-1] > 2 * TOKENS
    assert len(answers) == len(conversations), "the model says the same to every prompt"


@torch.no_grad()
def greedy(model: Any, ids: list[int], pixels: torch.Tensor, most: int, hidden: int) -> list[int]:
    """Return the reference's greedy tokens; ``hidden`` is never chosen."""
    made = list(ids)
    for _ in range(most):
        logits = model(torch.tensor([made]), pixel_values=pixels, use_cache=False).logits[0, -1]
        logits[hidden] = -torch.inf
        top = logits.topk(2).values
        assert top[0] - top[1] > 1e-6, "a tie: choose another seed"
        made.append(int(logits.argmax()))
    return made[len(ids) :]
