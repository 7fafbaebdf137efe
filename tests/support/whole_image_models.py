"""Tiny models of Gemma 3, Gemma 4, Mistral Small 3.x, InternVL and Llama 4: towers of transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.declared_models import LLAMA4
from weft.config.spec import ModelSpec
from weft.models.vision.base import colour_table

Tensor = torch.Tensor
PLACEHOLDER, ROW_END, START, END = 120, 121, 122, 123
BESIDE, BELOW, WHOLE = 124, 125, 126
SQUARE = ("gemma3", "internvl", "internvl-qwen3", "llama4")
"""Models whose items all have 3 x 3 tokens."""
FULL, SLIDING = "full_attention", "sliding_attention"
_TEXT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
_INTERN_VIT = {
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [24, 24],
    "patch_size": [4, 4],
}
_LLAMA4_TOWER = {
    "hidden_size": 24,
    # The size of four joined patches.
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_GEMMA4_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 150,
    "standardize": True,
    "use_clipped_linears": True,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 60,
}


def _internvl(model_type: str, tower: dict[str, Any], **text: Any) -> dict[str, Any]:
    own = {name: value for name, value in _TEXT.items() if model_type != "qwen2" or name != "head_dim"}
    return {
        "text_config": {**own, "model_type": model_type, **text},
        "vision_config": {**_INTERN_VIT, **tower},
        "image_token_id": PLACEHOLDER,
        "image_seq_length": 9,
        "tie_word_embeddings": model_type != "qwen2",
    }


def _gemma4(**text: Any) -> dict[str, Any]:
    own = {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 6,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 131,
        "num_kv_shared_layers": 0,
        "pad_token_id": 3,
    }
    return {
        "text_config": {**_TEXT, **own, **text},
        "vision_config": _GEMMA4_TOWER,
        "audio_config": None,
        "boi_token_id": START,
        "eoi_token_id": END,
        "image_token_id": PLACEHOLDER,
        "video_token_id": 124,
        "audio_token_id": 125,
    }


#: name -> (family name in transformers, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            # An image has more tokens than the window.
            "text_config": {**_TEXT, "sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 9,
            "boi_token_index": START,
            "eoi_token_index": END,
            "image_token_index": PLACEHOLDER,
        },
    ),
    "gemma4": ("Gemma4", _gemma4(use_bidirectional_attention="vision")),
    # The small sizes: inputs of each layer, shared caches, and causal images.
    "gemma4-inputs": (
        "Gemma4",
        _gemma4(hidden_size_per_layer_input=6, num_kv_shared_layers=2, use_bidirectional_attention=None),
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": _PIXTRAL,
            "image_token_index": PLACEHOLDER,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        "Mistral3",
        {
            "text_config": {
                **_TEXT,
                "model_type": "ministral3",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            "vision_config": _PIXTRAL,
            "image_token_index": PLACEHOLDER,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "internvl": ("InternVL", _internvl("qwen2", {"attention_bias": True})),
    # The largest towers: norms over all heads, and norms without a mean.
    "internvl-qwen3": ("InternVL", _internvl("qwen3", {"use_qk_norm": True, "norm_type": "rms_norm"})),
    "llama4": (
        "Llama4",
        {
            "text_config": {**LLAMA4, **_TEXT, "attention_chunk_size": 5, "floor_scale": 4},
            "vision_config": _LLAMA4_TOWER,
            "image_token_index": PLACEHOLDER,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
    ),
}

_COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
PROCESSORS: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 24, "width": 24},
        "do_pan_and_scan": None,
        "resample": 2,
        **_COLOURS,
    },
    "Gemma4": {
        "image_processor_type": "Gemma4ImageProcessor",
        "do_normalize": False,
        "max_soft_tokens": 70,
        "patch_size": 4,
        "pooling_kernel_size": 2,
    },
    "Mistral3": {
        "image_processor_type": "PixtralImageProcessorFast",
        "patch_size": {"height": 4, "width": 4},
        "size": {"longest_edge": 60},
        **_COLOURS,
    },
    "InternVL": {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "crop_to_patches": False,
        "size": {"height": 24, "width": 24},
        "max_patches": 6,
        "resample": 3,
        **_COLOURS,
    },
    "Llama4": {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": 24, "width": 24},
        "max_patches": 5,
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
#: Further files of a checkpoint.
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "Mistral3": {
        "processor_config.json": {
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                str(ROW_END): {"content": "[IMG_BREAK]"},
                str(END): {"content": "[IMG_END]"},
            }
        },
    },
    "InternVL": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(START): {"content": "<img>"}, str(END): {"content": "</img>"}}
        }
    },
    "Llama4": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                str(BESIDE): {"content": "<|tile_x_separator|>"},
                str(BELOW): {"content": "<|tile_y_separator|>"},
                str(WHOLE): {"content": "<|image|>"},
            }
        }
    },
}


def inputs_of(images: list[Tensor], spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Return the reference's inputs for ``images``, uint8 [1, height, width, 3] each."""
    assert spec.vision is not None
    media = spec.vision.media
    colours = colour_table(media, torch.float32, torch.device("cpu"))
    pixels = [torch.stack([colours[c][image[0, ..., c].long()] for c in range(3)]) for image in images]
    if media.kind in ("fixed", "tiles"):
        return {"pixel_values": torch.stack(pixels).to(dtype)}
    if media.kind == "longest":
        sizes = [tuple(one.shape[1:]) for one in pixels]
        high, wide = (max(sides) for sides in zip(*sizes, strict=True))
        padded = [
            torch.nn.functional.pad(one, (0, wide - size[1], 0, high - size[0]))
            for one, size in zip(pixels, sizes, strict=True)
        ]
        return {"pixel_values": torch.stack(padded).to(dtype), "image_sizes": torch.tensor(sizes)}
    most = media.budget * media.merge**2
    patches, places = [], []
    for one in pixels:
        rows, columns = one.shape[1] // media.patch, one.shape[2] // media.patch
        cut = one.view(3, rows, media.patch, columns, media.patch).permute(1, 3, 2, 4, 0)
        cut = cut.reshape(rows * columns, -1)
        at = torch.tensor([(x, y) for y in range(rows) for x in range(columns)])
        patches.append(torch.nn.functional.pad(cut, (0, 0, 0, most - len(cut))))
        places.append(torch.nn.functional.pad(at, (0, 0, 0, most - len(at)), value=-1))
    return {"pixel_values": torch.stack(patches).to(dtype), "image_position_ids": torch.stack(places)}


def types_name(family: str) -> str:
    """Return the reference's name of the types of the tokens; "" if the reference has no types."""
    return {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}.get(family, "")
