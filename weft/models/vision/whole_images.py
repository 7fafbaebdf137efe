"""Towers of Gemma 3, Gemma 4, Mistral Small 3.x, InternVL and Llama 4, with the modules of transformers.

A tower has two parts with the names of the checkpoint: an encoder, and the projector to the hidden size of
the text model. Weft's loader fills both by the names of the modules. Each tile of an image of InternVL or
Llama 4 is an image here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.common.errors import ConfigError
from weft.config.spec import VisionSpec
from weft.layers.build import Build
from weft.models.vision.base import Embedding, Tower, check_image, colour_table
from weft.models.vision.published import fill_buffers
from weft.models.weights import WeightMap

Tensor = torch.Tensor


class _Classes(NamedTuple):
    """Classes of transformers, and names of the parts in a checkpoint."""

    package: str
    config: str
    projector: str
    projector_class: str
    encoder: str = "vision_tower"
    encoder_class: str = ""
    """Class of the encoder; "" for the class of ``vision_config``."""


_PROJECTOR = "multi_modal_projector"
_CLASSES = {
    "gemma3": _Classes("gemma3", "Gemma3Config", _PROJECTOR, "Gemma3MultiModalProjector"),
    "gemma4": _Classes("gemma4", "Gemma4Config", "embed_vision", "Gemma4MultimodalEmbedder"),
    "mistral3": _Classes("mistral3", "Mistral3Config", _PROJECTOR, "Mistral3MultiModalProjector"),
    "internvl": _Classes("internvl", "InternVLConfig", _PROJECTOR, "InternVLMultiModalProjector"),
    "llama4": _Classes(
        "llama4", "Llama4Config", _PROJECTOR, "Llama4MultiModalProjector", "vision_model", "Llama4VisionModel"
    ),
}
_INNER = {"gemma3": "vision_model."}
"""Kind -> prefix of the encoder's tensors below ``vision_tower.`` in most checkpoints."""


class ImageTower(Tower):
    """An encoder and a projector of transformers, on one rank. The tower encodes one image per call."""

    def __init__(self, vision: VisionSpec, build: Build) -> None:
        """Build the tower with unset weights. Raises ConfigError if transformers cannot make the tower."""
        super().__init__()
        self._media = vision.media
        self._kind = vision.kind
        self.capturable = vision.kind != "gemma4"  # its modules drop padding by a boolean index
        # The modules round pixels to the dtype of the model.
        self._colours = colour_table(vision.media, torch.float32, build.device)
        self.module = image_skeleton(vision)
        for part in self.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = build.weight(*parameter.shape)
        fill_buffers(getattr(self.module, _CLASSES[vision.kind].encoder), build.device)

    def embed_batch(self, images: Sequence[Tensor]) -> list[Embedding]:
        """Encode images one by one; see ``Tower.embed_batch``."""
        for image in images:
            check_image(image, self._media)
            if len(image) != 1:
                raise ValueError(f"an image of {len(image)} frames; this tower takes 1")
        return [Embedding(main=self._embed(image[0])) for image in images]

    def _embed(self, image: Tensor) -> Tensor:
        """Return the rows of an image, uint8 [height, width, 3]."""
        pixels = torch.stack([self._colours[c][image[..., c].long()] for c in range(3)])
        if self._kind == "gemma4":
            return self._gemma4(pixels)
        if self._kind == "mistral3":
            return self._mistral3(pixels)
        if self._kind == "internvl":
            return self._internvl(pixels)
        if self._kind == "llama4":
            return self._llama4(pixels)
        tower, project = self.module.vision_tower, self.module.multi_modal_projector
        rows: Tensor = project(tower(pixel_values=pixels.unsqueeze(0)).last_hidden_state)[0]
        return rows

    def _gemma4(self, pixels: Tensor) -> Tensor:
        """Return [tokens, output] for pixels [3, height, width]."""
        size = self._media.patch
        # [rows, columns, y, x, colour] -> one patch per row
        cut = pixels.unflatten(2, (-1, size)).unflatten(1, (-1, size)).permute(1, 3, 2, 4, 0)
        rows, columns = cut.shape[:2]
        places = _places(rows, columns, pixels.device).flip(1)  # column before row
        made = self.module.vision_tower(
            pixel_values=cut.reshape(1, rows * columns, -1), pixel_position_ids=places.unsqueeze(0)
        )
        projected: Tensor = self.module.embed_vision(inputs_embeds=made.last_hidden_state)
        return projected

    def _mistral3(self, pixels: Tensor) -> Tensor:
        """Return [tokens, output] for pixels [3, height, width], with unused rows for tokens of text."""
        tower, media = self.module.vision_tower, self._media
        cut = tower.patch_conv(pixels.unsqueeze(0).to(tower.patch_conv.weight.dtype))
        x = tower.ln_pre(cut.flatten(2).transpose(1, 2))
        places = _places(cut.shape[2], cut.shape[3], pixels.device)
        # All patches belong to one image, so no mask is needed.
        angles = tower.patch_positional_embedding(x, places)
        x = tower.transformer(x, attention_mask=None, position_embeddings=angles).last_hidden_state
        rows: Tensor = self.module.multi_modal_projector(x[0], [tuple(pixels.shape[1:])])
        return with_gaps(rows, cut.shape[3] // media.merge)

    def _internvl(self, pixels: Tensor) -> Tensor:
        """Return [tokens, output] for a tile, pixels [3, side, side]."""
        made = self.module.vision_tower(pixel_values=pixels.unsqueeze(0)).last_hidden_state[0, 1:]
        columns, merge = pixels.shape[2] // self._media.patch, self._media.merge
        # [row, patch row, column, patch column, hidden] -> the patches of a token side by side
        squares = made.view(-1, merge, columns // merge, merge, made.shape[1]).transpose(1, 2)
        rows: Tensor = self.module.multi_modal_projector(squares.flatten(2).flatten(0, 1))
        return rows

    def _llama4(self, pixels: Tensor) -> Tensor:
        """Return [tokens, output] for a tile, pixels [3, side, side]."""
        tower = self.module.vision_model
        given = pixels.unsqueeze(0).to(tower.class_embedding.dtype)
        rows: Tensor = self.module.multi_modal_projector(tower(given).last_hidden_state[0])
        return rows


def _places(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return row and column of each patch, int64 [rows * columns, 2]."""
    row = torch.arange(rows, device=device).view(rows, 1, 1).expand(rows, columns, 1)
    column = torch.arange(columns, device=device).view(1, columns, 1).expand(rows, columns, 1)
    return torch.cat((row, column), dim=2).view(-1, 2)


def with_gaps(rows: Tensor, columns: int) -> Tensor:
    """Return ``rows`` with a row of zeros behind every ``columns`` rows; see ``MediaFacts.row_end``."""
    lines = rows.view(-1, columns, rows.shape[1])
    return torch.cat((lines, torch.zeros_like(lines[:, :1])), dim=1).flatten(0, 1)


def image_skeleton(vision: VisionSpec) -> Any:
    """Return encoder and projector without memory, on the meta device. Raises ConfigError."""
    names = _CLASSES[vision.kind]
    try:
        package = f"transformers.models.{names.package}"
        code = import_module(f"{package}.modeling_{names.package}")
        config = getattr(import_module(package), names.config)(**json.loads(vision.settings))
        config._attn_implementation = config.vision_config._attn_implementation = "sdpa"
        given = (config.vision_config, config.text_config) if vision.kind == "gemma4" else (config,)
        made = nn.Module()
        with torch.device("meta"):
            own = names.encoder_class
            make = getattr(code, own) if own else code.AutoModel.from_config
            made.add_module(names.encoder, make(config.vision_config).eval())
            made.add_module(names.projector, getattr(code, names.projector_class)(*given).eval())
    except Exception as error:  # modeling code raises many types
        raise ConfigError(
            f"transformers cannot make the tower from vision_config: {error}", param="--model"
        ) from error
    for part in made.modules():
        # Saved buffers are loaded like parameters.
        for name in sorted(set(part._buffers) - part._non_persistent_buffers_set):
            saved = part._buffers.pop(name)
            if saved is not None:
                part._parameters[name] = nn.Parameter(saved, requires_grad=False)
    return made


@cache
def _names(vision: VisionSpec) -> tuple[str, ...]:
    """Return the names of the tower's parameters."""
    return tuple(name for name, _ in image_skeleton(vision).named_parameters())


def add_images(made: WeightMap, vision: VisionSpec) -> None:
    """Add the tensors of a tower to ``made``: in each published form, alone or below ``model.``."""
    classes = _CLASSES[vision.kind]
    for part in (f"{classes.encoder}.", f"{classes.projector}."):
        names = [name for name in _names(vision) if name.startswith(part)]
        forms = [part, f"model.{part}"]
        if part == "vision_tower." and vision.kind in _INNER:
            forms += [f"{form}{_INNER[vision.kind]}" for form in forms]
        for form in forms:
            for name in names:
                made.add(form + name.removeprefix(part), f"vision.module.{name}")
        made.choices.append(tuple(tuple(form + n.removeprefix(part) for n in names) for form in forms))
