"""ocr-mini as chats, and the answers of transformers. Greedy."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from weft.cli.evaluate.text_answers import Chat
from weft.cli.reference import require_transformers
from weft.common.progress import progress_bar
from weft.config import hub
from weft.config.sections.all import Config
from weft.eval.ocr_mini import Line, messages

MOST_TOKENS = 32
"""Default maximum of tokens per answer of transformers. Every line has fewer tokens."""


def chats_of(lines: Sequence[Line]) -> list[Chat]:
    """Return a question per line, with the image as a ``data:`` URL."""
    return [messages(line) for line in lines]


def from_reference(config: Config, lines: Sequence[Line], max_tokens: int | None) -> tuple[str, list[str]]:
    """Return (model name, one text per line) from ``transformers``, one line at a time.

    Loads the model, and sets the number of threads of this process. Raise ConfigError if ``transformers`` is
    not installed.
    """
    transformers = require_transformers()
    import torch
    from PIL import Image

    from weft.engine.cpu_threads import set_threads

    set_threads(config.runner.threads)
    path = hub.resolve_model_path(config.model.model, config.model.revision)
    dtype = "auto" if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(
        path,
        dtype=dtype,
        experts_implementation="eager",  # other implementations lack float64; no effect without experts
    ).eval()
    device = "cuda" if config.runner.device != "cpu" and torch.cuda.is_available() else "cpu"
    loaded = loaded.to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    mark = loaded.config.image_token_id
    texts: list[str] = []
    with progress_bar(total=len(lines), title="ocr-mini", unit="line") as bar:
        for line in lines:
            chat = messages(line)
            address = chat[0]["content"][0]["image_url"]["url"]
            image = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
            seen = processor(images=[image], return_tensors="pt").to(device)
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = _widen(
                tokenizer(prompt, add_special_tokens=False)["input_ids"],
                mark,
                int(seen["image_grid_thw"].prod()) // processor.merge_size**2,
            )
            batch = torch.tensor([ids], device=device)
            made = loaded.generate(
                input_ids=batch,
                attention_mask=torch.ones_like(batch),
                mm_token_type_ids=(batch == mark).int(),
                pixel_values=seen["pixel_values"].to(loaded.dtype),
                image_grid_thw=seen["image_grid_thw"],
                do_sample=False,
                max_new_tokens=max_tokens or MOST_TOKENS,
            )
            texts.append(str(tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)))
            bar.update()
    return f"{config.model.model} (transformers)", texts


def _widen(ids: Sequence[int], mark: int, count: int) -> list[int]:
    """Return the ids with ``count`` placeholders in place of each single placeholder."""
    return [i for id_ in ids for i in ([id_] * count if id_ == mark else [id_])]
