"""Make tiny vision models with ``transformers``, and prompts with images and videos for them and for Weft."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import whole_image_models
from tests.support.delta_models import CASES as DELTA_CASES
from tests.support.latent_models import CASES as LATENT_CASES
from weft.attention.base import MediaRows
from weft.config.spec import ModelSpec
from weft.models.decoder import Model
from weft.models.vision import Embedding, Tower
from weft.models.vision.base import colour_table, patches
from weft.types.media_item import SPAN, MediaItem, rope_positions, spans_of

Tensor = torch.Tensor

PLACEHOLDER, VIDEO, START, END = 120, 121, 122, 123
_IDS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TEXT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}
_KIMI_TOWER: dict[str, Any] = {
    "patch_size": 4,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 44,
}
_QWEN_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 256, "longest_edge": 3200},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
_KIMI_PROCESSOR: dict[str, Any] = {
    "media_proc_cfg": {
        "in_patch_limit": 200,
        "patch_size": 4,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 20,
    }
}


def _qwen(levels: list[int], **text: Any) -> dict[str, Any]:
    return {
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _MROPE, **text},
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": levels},
        **_IDS,
    }


def _five(name: str) -> dict[str, Any]:
    text = {key: value for key, value in {**_TEXT, **DELTA_CASES[name][1]}.items() if value is not None}
    rope = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return {"text_config": {**text, "rope_parameters": rope}, "vision_config": _QWEN_TOWER, **_IDS}


#: Windows of 2 x 2 tokens in layers 0 and 2.
_FIVE_VL: dict[str, Any] = {
    "text_config": {
        **_TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 3, 2]},
    },
    "vision_config": {
        **{name: size for name, size in _QWEN_TOWER.items() if name != "num_position_embeddings"},
        "window_size": 16,
        "tokens_per_second": 3,
        "fullatt_block_indexes": [1],
    },
    **_IDS,
}

_TWO_VL: dict[str, Any] = {
    **_FIVE_VL,
    "vision_config": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 48,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    },
}

#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", _qwen([0, 2])),
    # As many levels as layers: the last level is added only to the rows with logits.
    "qwen3-vl-levels": ("Qwen3VL", {**_qwen([0, 1, 2]), "tie_word_embeddings": True}),
    "qwen3-vl-moe": ("Qwen3VLMoe", _qwen([1], **_ROUTED, mlp_only_layers=[1])),
    "qwen3-5-vision": ("Qwen3_5", _five("qwen3-5")),
    "qwen3-5-moe-vision": ("Qwen3_5Moe", _five("qwen3-5-moe")),
    "qwen2-vl": ("Qwen2VL", _TWO_VL),
    "qwen2-5-vl": ("Qwen2_5_VL", _FIVE_VL),
    "kimi-k25": (
        "Kimi_K25",
        {
            "text_config": {**_TEXT, **LATENT_CASES["deepseek-v3"][1], "model_type": "deepseek_v3"},
            "vision_config": _KIMI_TOWER,
            "projection_hidden_size": 32,
            "projection_layer_norm_eps": 1e-4,
            "tie_word_embeddings": False,
            **_IDS,
        },
    ),
}


def processor_of(family: str) -> dict[str, Any]:
    """Return the content of preprocessor_config.json."""
    more = {"Kimi_K25": _KIMI_PROCESSOR, **whole_image_models.PROCESSORS}
    return more.get(family, _QWEN_PROCESSOR)


def config_for(name: str) -> dict[str, Any]:
    """Return config.json of a case."""
    family, settings = CASES[name]
    made: dict[str, Any] = getattr(transformers, f"{family}Config")(**settings).to_diff_dict()
    return {**made, "architectures": [f"{family}ForConditionalGeneration"]}


def save_tiny(name: str, folder: Path, randomize: Any) -> Any:
    """Save a random checkpoint in its published layout. Return the reference model.

    ``randomize`` sets the weights of a model; see tests/models/conftest.py.
    """
    family, settings = (CASES | whole_image_models.CASES)[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    randomize(reference)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_of(family)))
    if family == "Kimi_K25":
        publish(folder)
    for file, content in whole_image_models.FILES.get(family, {}).items():
        (folder / file).write_text(json.dumps(content))
    return reference


def publish(folder: Path) -> None:
    """Rename tensors to the published names, which transformers 5.23 loads but does not save."""
    (single,) = folder.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(single).items():
        name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
        name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
        tensors[name.removeprefix("model.")] = tensor
    save_file(tensors, single, metadata={"format": "pt"})


def random_image(height: int, width: int, seed: int, frames: int = 1) -> Tensor:
    """uint8 [frames, height, width, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=generator)


@dataclass(frozen=True)
class Prompt:
    """Text, images and videos, in order."""

    ids: list[int]
    images: list[Tensor]
    """Pixels of each item."""
    items: list[MediaItem]
    """Images, and groups of a video's frames."""
    clips: list[int] = field(default_factory=list)
    """Groups of each video, in order."""
    seconds: list[float] = field(default_factory=list)
    """Seconds from group to group of each video."""

    def spans(self, spec: ModelSpec) -> np.ndarray:
        assert spec.vision is not None
        return spans_of(self.items, spec.vision.media.merge)

    def embedded(self, tower: Tower) -> list[Embedding]:
        """Return the tower's embedding of each image."""
        with torch.inference_mode():
            device = next(tower.parameters()).device
            return [tower.embed(image.to(device)) for image in self.images]

    def inputs(self, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Return the reference's inputs besides ids. Pixels are computed here; see test_vision.py."""
        if not self.images:
            return {}
        assert spec.vision is not None
        media = spec.vision.media
        if media.kind not in ("area", "patches"):
            return whole_image_models.inputs_of(self.images, spec, dtype)
        colours = colour_table(media, torch.float32, torch.device("cpu"))
        made: dict[str, Any] = {}
        for token, values, grid in (
            (PLACEHOLDER, "pixel_values", "image_grid_thw"),
            (VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            each = zip(self.items, self.images, strict=True)
            shown = [(item.grid, image) for item, image in each if self.ids[item.start] == token]
            if not shown:
                continue
            pixels = torch.cat([patches(image, media, colours) for _, image in shown])
            if media.kind == "patches":
                pixels = pixels.view(len(pixels), 3, media.patch, media.patch)
            grids = [found for found, _ in shown]
            if token == VIDEO:
                firsts = np.cumsum([0, *self.clips])
                grids = [(n, *grids[at][1:]) for n, at in zip(self.clips, firsts, strict=False)]
            made |= {values: pixels.to(dtype), grid: torch.tensor(grids)}
        return made

    def joined_positions(self, length: int, spec: ModelSpec) -> dict[str, Tensor]:
        """Return rope positions ``position_ids`` int64 [3, 1, length] of a prompt with joined videos, by the
        publisher's rule: what follows continues behind the largest position so far. Empty without joined
        videos: the reference computes the positions. The reference in transformers 5 leaves the lag out for
        text behind a video, and so repeats positions in long videos; see ADR 0077.
        """
        assert spec.vision is not None
        media = spec.vision.media
        if not self.clips or media.frames is None or not media.frames.joined:
            return {}
        pieces: list[Tensor] = []
        end, next_one = 0, 0

        def text(upto: int) -> None:
            pieces.append((torch.arange(upto - end) + next_one).expand(3, -1))

        clips = iter(zip(self.clips, self.seconds, strict=True))
        items = iter(self.items)
        for item in items:
            text(item.start)
            next_one += item.start - end
            groups, seconds = next(clips) if self.ids[item.start] == VIDEO else (1, 0.0)
            step = torch.tensor(seconds) * media.frames.pace if media.frames.pace else torch.tensor(1.0)
            sides = [torch.arange(side // media.merge) for side in item.grid[1:]]
            grid = torch.stack(torch.meshgrid((torch.arange(groups) * step).long(), *sides, indexing="ij"))
            pieces.append(grid.reshape(3, -1) + next_one)
            next_one = int(pieces[-1].max()) + 1
            end = item.start + groups * item.count
            for _ in range(groups - 1):
                next(items)
        text(length)
        return {"position_ids": torch.cat(pieces, dim=1).unsqueeze(1)}


@dataclass(frozen=True)
class Clip:
    """A video of so many frames, of so many rows and columns of tokens."""

    frames: int
    rows: int
    columns: int
    fps: float = 2.0


def make_prompt(parts: Seq[int | tuple[int, int] | Clip], spec: ModelSpec, seed: int) -> Prompt:
    """parts: so many tokens of text, an image of so many rows and columns of tokens, or a video."""
    assert spec.vision is not None
    media = spec.vision.media
    random_ids = random.Random(seed)
    ids: list[int] = []
    images: list[Tensor] = []
    items: list[MediaItem] = []
    clips: list[int] = []
    seconds: list[float] = []

    def text(count: int) -> None:
        ids.extend(random_ids.randrange(PLACEHOLDER) for _ in range(count))

    averages = media.frames is not None and media.frames.averaged > 0

    def show(sides: tuple[int, int], token: int, frames: int, *, alone: bool, lag: int | None = None) -> None:
        rows, columns = sides[0] * media.merge, sides[1] * media.merge
        grid = (frames if averages else 1, rows, columns)
        images.append(random_image(rows * media.patch, columns * media.patch, seed + len(items), frames))
        gaps = media.row_end is not None
        count = sides[0] * (sides[1] + gaps)
        ids.extend([START] if alone else [])
        items.append(MediaItem(key=b"", start=len(ids), count=count, grid=grid, lag=lag))
        ids.extend(media.tokens_of(token, count, grid) + ([END] if alone and not gaps else []))

    for part in parts:
        if isinstance(part, int):
            text(part)
        elif isinstance(part, tuple):
            show(part, PLACEHOLDER, 1, alone=True)
        else:
            ids.append(START)
            assert media.frames is not None
            timed = not media.frames.joined
            size = media.group
            groups = -(-part.frames // size)
            # The reference's processor writes a time before each group, all within another pair, or no text.
            assert media.video is not None
            for number, lag in enumerate(media.frames.lags(groups, size, part.fps)):
                text(3 if timed else 0)
                frames = min(size, part.frames - size * number)
                show((part.rows, part.columns), media.video, frames, alone=timed, lag=lag)
            ids.append(END)
            clips.append(groups)
            seconds.append(size / part.fps)
    return Prompt(ids, images, items, clips, seconds)


def types_of(ids: Seq[int], *, videos: bool) -> Tensor:
    """Return ``mm_token_type_ids`` of the reference: 1 for image tokens, 2 for video tokens.

    Without ``videos`` a video token was generated and counts as text.
    """
    kinds = {PLACEHOLDER: 1, VIDEO: 2} if videos else {PLACEHOLDER: 1}
    return torch.tensor([[kinds.get(token, 0) for token in ids]])


@dataclass(frozen=True)
class Seen:
    """Hold a rank's view of a prompt's images."""

    spans: np.ndarray
    """Spans in the form of ``spans_of``."""
    embedded: list[Embedding]
    gaps: bool = False
    """True if a token of text follows each row of an image."""

    @classmethod
    def of(cls, prompt: Prompt, model: Model) -> Seen:
        assert model.vision is not None
        assert model.spec.vision is not None
        gaps = model.spec.vision.media.row_end is not None
        return cls(prompt.spans(model.spec), prompt.embedded(model.vision), gaps)

    def rows(self, begin: int, end: int) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Return (places, main rows, level rows) of image tokens in positions ``begin`` .. ``end - 1``.

        Places are relative to ``begin``.
        """
        places: list[int] = []
        main, levels = [], []
        for (start, count, _, _, columns, _), embedding in zip(
            self.spans.tolist(), self.embedded, strict=True
        ):
            low, high = max(start, begin), min(start + count, end)
            if low < high:
                step = columns + 1 if self.gaps else 0
                rows = [at for at in range(low - start, high - start) if not step or (at + 1) % step]
                places += [start + at - begin for at in rows]
                main.append(embedding.main[rows])
                if embedding.levels is not None:
                    levels.append(embedding.levels[:, low - start : high - start])
        return places, main, levels


def media_of(rows: Seq[tuple[Any, int]]) -> MediaRows | None:
    """Return the image rows of a step with rows (sequence, count); None without image rows.

    ``sequence.seen`` is a ``Seen`` or None.
    """
    places: list[int] = []
    main: list[Tensor] = []
    levels: list[Tensor] = []
    begin = 0
    for sequence, count in rows:
        if sequence.seen is not None:
            found = sequence.seen.rows(sequence.computed, sequence.computed + count)
            places += [begin + place for place in found[0]]
            main += found[1]
            levels += found[2]
        begin += count
    if not places:
        return None
    joined = torch.cat(levels, dim=1) if levels else None
    return MediaRows(rows=torch.tensor(places, device=main[0].device), main=torch.cat(main), levels=joined)


def rope_positions_of(rows: Seq[tuple[Any, int]]) -> Tensor | None:
    """Return int64 [3, T] rope positions of a step's tokens; None if no sequence has images."""
    if not any(sequence.seen is not None for sequence, _ in rows):
        return None
    made = []
    for sequence, count in rows:
        spans = np.zeros((0, SPAN), np.int32) if sequence.seen is None else sequence.seen.spans
        made.append(rope_positions(spans, np.arange(sequence.computed, sequence.computed + count)))
    return torch.from_numpy(np.concatenate(made, axis=1))
