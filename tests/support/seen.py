"""Prompts with images in the form of an engine's clients, and the answers of the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.support import whole_image_models
from tests.support.vision_models import (
    PLACEHOLDER,
    Clip,
    Prompt,
    make_prompt,
    save_tiny,
    types_of,
)
from weft.config.families import load_spec
from weft.types.media_item import MediaItem


@dataclass(frozen=True)
class Seen:
    """A prompt with images."""

    prompt: Prompt

    @property
    def ids(self) -> list[int]:
        return self.prompt.ids

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """With keys and pixels."""
        pairs = zip(self.prompt.items, self.prompt.images, strict=True)
        return tuple(_with_pixels(item, image) for item, image in pairs)

    def with_images_of(self, other: Seen) -> Seen:
        """Return the same tokens with the images of ``other``, which have the same sizes."""
        assert [i.count for i in self.prompt.items] == [i.count for i in other.prompt.items]
        return Seen(replace(self.prompt, images=other.prompt.images))

    def then(self, ids: Sequence[int], more: Seen) -> Seen:
        """Return the prompt of the next turn: this prompt, the answer ``ids``, then ``more``."""
        before = [*self.ids, *ids]
        moved = [msgspec.structs.replace(i, start=i.start + len(before)) for i in more.prompt.items]
        return Seen(
            Prompt(
                [*before, *more.ids],
                [*self.prompt.images, *more.prompt.images],
                [*self.prompt.items, *moved],
                [*self.prompt.clips, *more.prompt.clips],
                [*self.prompt.seconds, *more.prompt.seconds],
            )
        )


def _with_pixels(item: MediaItem, image: torch.Tensor) -> MediaItem:
    pixels = image.numpy().tobytes()
    key = blake2b(pixels + repr(item.grid).encode(), digest_size=16).digest()
    return msgspec.structs.replace(item, key=key, pixels=pixels)


class SeeingModels:
    """Make the tiny checkpoints of ``tests.support.vision_models.CASES`` on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made = cache(self._make)

    def _make(self, name: str) -> tuple[Path, Any]:
        from tests.models.conftest import _randomize

        folder = self._root / name
        reference = save_tiny(name, folder, partial(_randomize, seed=0))
        whole = type(reference)(reference.config).double().eval()
        whole.load_state_dict(reference.state_dict())
        whole.config._experts_implementation = "eager"
        return folder, whole

    def folder(self, name: str) -> Path:
        return self._made(name)[0]

    def seen(self, name: str, parts: Sequence[int | tuple[int, int] | Clip], seed: int) -> Seen:
        """As ``make_prompt``: so many tokens of text, an image of so many rows and columns of tokens, or a
        video."""
        return Seen(make_prompt(parts, load_spec(str(self.folder(name))), seed))

    @torch.no_grad()
    def greedy(self, name: str, seen: Seen, most: int, hidden: Sequence[int] = (PLACEHOLDER,)) -> list[int]:
        """Return the greedy answer of the reference in float64, recomputing the whole prompt for each token.

        ``hidden`` tokens are never chosen: after a placeholder the reference would expect another image.
        """
        _, reference = self._made(name)
        ids = list(seen.ids)
        spec = load_spec(str(self.folder(name)))
        more = seen.prompt.inputs(spec, torch.float64)
        for _ in range(most):
            types: dict[str, Any] = seen.prompt.joined_positions(len(ids), spec)
            if name in whole_image_models.CASES:
                if kind := whole_image_models.types_name(whole_image_models.CASES[name][0]):
                    types[kind] = types_of(ids, videos=False)
            elif name != "kimi-k25":
                types["mm_token_type_ids"] = types_of(ids, videos=bool(seen.prompt.clips))
            logits = reference(torch.tensor([ids]), use_cache=False, **more, **types).logits
            logits[0, -1, list(hidden)] = -torch.inf
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(seen.ids) :]
