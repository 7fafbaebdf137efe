"""Make training batches of ocr-mini, and evaluate a model on ocr-mini."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training.qwen3_5 import Qwen3_5MoeWithMtp, grid_of, patches
from training.tokenizer import END_OF_TEXT, IMAGE, IMAGE_END, IMAGE_START, TURN_END, TURN_START
from weft.eval.ocr_mini import Line, draw, lines

POOL_LINES = 4000  # lines of one seed


def prompt_text(line: Line, tokens: int) -> str:
    """Return the prompt in the form of the chat template, with ``tokens`` image placeholders."""
    image = IMAGE_START + IMAGE * tokens + IMAGE_END
    return f"{TURN_START}user\n{image}{line.prompt}{TURN_END}\n{TURN_START}assistant\n"


def pictures(drawn: Sequence[Line]) -> Tensor:
    """The lines' images, uint8 [B, height, width]."""
    return torch.from_numpy(np.stack([np.asarray(draw(line)) for line in drawn]))


class Rows:
    """Encodes lines: ids [B, L] (int64), weights [B, L] (float32, 1 on the answer), images (uint8)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, image_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.image_tokens = image_tokens
        self.pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)

    def encode(self, drawn: Sequence[Line]) -> tuple[Tensor, Tensor, Tensor]:
        """Return one batch, padded on the right."""
        rows: list[tuple[list[int], int]] = []
        for line in drawn:
            prompt = self.tokenizer.encode(prompt_text(line, self.image_tokens), add_special_tokens=False)
            reply = self.tokenizer.encode(line.text + TURN_END, add_special_tokens=False)
            rows.append((prompt + reply, len(prompt)))
        length = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [self.pad] * (length - len(ids)) for ids, _ in rows])
        weights = torch.tensor([[float(begin <= i < len(ids)) for i in range(length)] for ids, begin in rows])
        return ids, weights, pictures(drawn)


def ocr_batches(
    rows: Rows, seed: int, first_pool: int, batch_tokens: int, lengths: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield endless batches of about ``batch_tokens`` tokens, padding included. Each pool has different
    lines.
    """
    longest = len(rows.encode([next(lines("train", 0))])[0][0]) + lengths[1]
    count = max(1, batch_tokens // longest)
    for pool in itertools.count(first_pool):
        drawn = list(itertools.islice(lines("train", seed * 1_000_000 + pool, lengths), POOL_LINES))
        for begin in range(0, POOL_LINES - count + 1, count):
            yield rows.encode(drawn[begin : begin + count])


@torch.no_grad()
def forced(
    model: Qwen3_5MoeWithMtp, rows: Rows, asked: Sequence[Line], batch: int = 100
) -> tuple[list[bool], float]:
    """Return (True for each line that greedy decoding reads exactly, share of correct answer tokens).

    A greedy answer equals the line if and only if every token of the line is the most likely token after its
    predecessors. Therefore a single teacher-forced pass suffices.
    """
    exact: list[bool] = []
    right = total = 0
    for begin in range(0, len(asked), batch):
        ids, weights, images = rows.encode(asked[begin : begin + batch])
        hidden, _, _ = model.read(ids, images)
        hits = model.lm_head(hidden[:, :-1]).argmax(-1) == ids[:, 1:]
        wanted = weights[:, 1:] > 0
        exact += (hits | ~wanted).all(1).tolist()
        right += int((hits & wanted).sum())
        total += int(wanted.sum())
    return exact, right / total


@torch.no_grad()
def read_lines(model: Qwen3_5MoeWithMtp, rows: Rows, asked: Sequence[Line], batch: int = 50) -> list[str]:
    """Greedy answers by ``transformers``' own ``generate``, one image a prompt."""
    answers: dict[int, str] = {}
    config = model.config.vision_config
    order = sorted(range(len(asked)), key=lambda i: asked[i].prompt)
    for _, group in itertools.groupby(order, key=lambda i: asked[i].prompt):  # prompts of one length
        numbers = list(group)
        for begin in range(0, len(numbers), batch):
            part = numbers[begin : begin + batch]
            texts = [prompt_text(asked[i], rows.image_tokens) for i in part]
            ids = torch.tensor(rows.tokenizer(texts, add_special_tokens=False)["input_ids"])
            images = pictures([asked[i] for i in part])
            pixels = patches(images, config.patch_size, config.spatial_merge_size)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
                pixel_values=pixels.flatten(0, 1),
                image_grid_thw=torch.tensor([grid_of(images, config.patch_size)] * len(part)),
                max_new_tokens=12,
                do_sample=False,
            )
            replies = rows.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            answers.update(zip(part, replies, strict=True))
    return [answers[i] for i in range(len(asked))]
