"""Registry of model families by ``ModelSpec.family``."""

from __future__ import annotations

from collections.abc import Callable

from weft.common.registry import Registry
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Block, Decoder, Model
from weft.models.weights import WeightMap

BLOCKS: Registry[Callable[[ModelSpec, int, Build], Block]] = Registry("model family")
WEIGHTS: Registry[Callable[[ModelSpec], WeightMap]] = Registry("model family")

_FAMILIES = (
    "qwen3_next",
    "qwen3_vl",
    "qwen3_5",
    "deepseek",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k25",
    "kimi_linear",
    "gpt_oss",
    "declared",
    "lfm2",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "granite_hybrid",
    "olmo_hybrid",
    "mamba2",
    "mamba1",
    "jamba",
    "bailing_hybrid",
)
for _family in _FAMILIES:
    BLOCKS.add(_family, f"weft.models.{_family}.model:make_block")
    WEIGHTS.add(_family, f"weft.models.{_family}.weights:weight_map")

#: Families with a subclass of ``Decoder`` as frame.
FRAMES: Registry[type[Decoder]] = Registry("model family")
FRAMES.add("declared", "weft.models.declared.model:DeclaredDecoder")
FRAMES.add("falcon_h1", "weft.models.declared.model:DeclaredDecoder")
FRAMES.add("olmo_hybrid", "weft.models.declared.model:DeclaredDecoder")
FRAMES.add("mamba2", "weft.models.mamba2.model:Mamba2Decoder")
FRAMES.add("mamba1", "weft.models.mamba2.model:Mamba2Decoder")
FRAMES.add("granite_hybrid", "weft.models.declared.model:DeclaredDecoder")
FRAMES.add("deepseek_v32", "weft.models.deepseek_v32.model:IndexedDecoder")
FRAMES.add("deepseek_v4", "weft.models.deepseek_v4.model:StreamsDecoder")

#: Families that load themselves, with the arguments of ``load_model``.
LOADERS: Registry[Callable[..., Model]] = Registry("model family")
LOADERS.add("transformers", "weft.models.generic.load:load")
