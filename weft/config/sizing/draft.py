"""Draft models: a second, smaller decoder whose KV cache lies beside the caches of the model.

In the caches, the layers of the draft model follow the model's layers. So blocks, prefixes and transfers
cover both models alike.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.declared.build import build_spec
from weft.config.families.facts import Facts, read_json
from weft.config.families.load import load_spec
from weft.config.sections.all import Config
from weft.config.sharding import check
from weft.config.spec import CacheSpec, EagleSpec, ModelSpec

_FLAG = "--speculative-model"
_LAYER = (
    *("attention_bias", "mlp_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
)
"""Fields of config.json that describe the layer of an EAGLE-3 head."""
_CACHES = ("full", "window", "chunk", "latent")


def with_draft(spec: ModelSpec, config: Config, path: str, draft_path: str) -> ModelSpec:
    """Return ``spec`` with the draft model of ``draft_path``. Raise ConfigError for a model that cannot
    draft for ``spec``."""
    if config.speculation.speculative_method == "eagle3":
        return _behind(spec, eagle_spec(spec, Path(draft_path)), config)
    draft = load_spec(draft_path, trust_remote_code=config.model.trust_remote_code, language_model_only=True)
    if not draft.head:
        raise ConfigError(
            f"{_FLAG}: the checkpoint has no output head, which drafts need; choose another model",
            param=_FLAG,
        )
    other = next((cache.kind for cache in draft.caches if cache.kind not in _CACHES), None)
    if other is not None:
        raise ConfigError(
            f"{_FLAG}: {draft.architecture} has layers with a cache of kind {other}, which is not supported "
            "in a draft model; choose a draft model with full, window or latent attention",
            param=_FLAG,
        )
    if (draft.moe or draft.counted_experts) is not None and config.parallel.enable_expert_parallel:
        raise ConfigError(
            f"{_FLAG}: a draft model with experts is not supported with --enable-expert-parallel; choose a "
            "dense draft model",
            param=_FLAG,
        )
    _check_vocabulary(Path(path), spec, Path(draft_path), draft)
    return _behind(spec, draft, config)


def eagle_spec(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return the spec of the EAGLE-3 head in ``folder`` for the model ``spec``. Raise ConfigError."""
    config = read_json(folder, "config.json") or {}
    names = config.get("architectures")
    if spec.hyper is not None:
        raise ConfigError(
            f"{_FLAG}: an EAGLE-3 head needs a model with one residual stream, and {spec.architecture} has "
            "several; use --speculative-method draft or ngram",
            param="--speculative-method",
        )
    if names not in (["LlamaForCausalLMEagle3"], ["Eagle3LlamaForCausalLM"]):
        raise ConfigError(
            f"{_FLAG}: {folder.name!r} is no EAGLE-3 head (architectures is {names!r}); for a whole model "
            "use --speculative-method draft",
            param=_FLAG,
        )
    facts = Facts(config)
    layer = {name: facts.get(name) for name in _LAYER if name in facts}
    draft = build_spec(Facts({**layer, "architectures": ["LlamaForCausalLM"]}), None)
    low, high = 2, spec.layers - 3
    taps = facts.integers("eagle_aux_hidden_state_layer_ids") or (low, spec.layers // 2, high)
    problem = None
    if draft.layers != 1:
        problem = f"the head has {draft.layers} layers; Weft runs heads of one layer"
    elif draft.hidden != spec.hidden or facts.integer("target_hidden_size", spec.hidden) != spec.hidden:
        problem = f"the head was trained for a hidden size other than {spec.hidden}"
    elif draft.vocab_size != spec.vocab_size:
        problem = f"the head has a vocabulary of {draft.vocab_size} tokens, the model of {spec.vocab_size}"
    elif len(taps) != 3 or not all(0 <= layer < spec.layers for layer in taps):
        problem = f"the head reads the layers {taps}, and the model has {spec.layers}"
    if problem is not None:
        raise ConfigError(f"{_FLAG}: {problem}; choose another head", param=_FLAG)
    eagle = EagleSpec(
        layers=taps,
        vocab_size=facts.integer("draft_vocab_size", draft.vocab_size),
        norm_before_residual=facts.flag("norm_before_residual", False),
    )
    return msgspec.structs.replace(draft, eagle=eagle, tied=False, architecture=names[0])


def _behind(spec: ModelSpec, draft: ModelSpec, config: Config) -> ModelSpec:
    """Return ``spec`` with ``draft``, whose cache groups follow the groups of ``spec``. Raise ConfigError."""
    check(draft, config.parallel.layout)
    layers = spec.layers + spec.mtp_layers
    behind = tuple(
        msgspec.structs.replace(cache, layers=tuple(layers + layer for layer in cache.layers))
        for cache in draft.caches
    )
    return msgspec.structs.replace(spec, draft=draft, caches=(*spec.caches, *behind))


def draft_part(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the draft model of ``spec`` for building: its cache groups have the numbers of the
    whole model."""
    draft = spec.draft
    assert draft is not None
    own = len(draft.caches)
    before = tuple(msgspec.structs.replace(cache, layers=()) for cache in spec.caches[:-own])
    # The first layer of the draft model is layer 0 of its blocks, whatever its number in the caches.
    behind = tuple(
        msgspec.structs.replace(cache, layers=one.layers)
        for cache, one in zip(spec.caches[-own:], draft.caches, strict=True)
    )
    return msgspec.structs.replace(draft, caches=(*before, *behind))


def owner_of(cache: CacheSpec, spec: ModelSpec) -> ModelSpec:
    """Return the model with the layers of ``cache``: ``spec`` or its draft model."""
    drafts = spec.draft is not None and min(cache.layers, default=0) >= spec.layers + spec.mtp_layers
    return spec.draft if drafts and spec.draft is not None else spec


def _check_vocabulary(path: Path, spec: ModelSpec, draft_path: Path, draft: ModelSpec) -> None:
    """Raise ConfigError unless both models have the same tokens. The sizes of the tables may differ, because
    publishers pad tables."""
    own, other = _tokens(path), _tokens(draft_path)
    if own is None or other is None:
        same = spec.vocab_size == draft.vocab_size
    else:
        same = own == other
    if not same:
        raise ConfigError(
            f"{_FLAG}: {draft_path.name!r} has another vocabulary than {path.name!r}; a draft model needs "
            "the same tokens",
            param=_FLAG,
        )


def _tokens(folder: Path) -> tuple[object, object] | None:
    """Return the vocabulary in ``tokenizer.json``, added tokens included; None without the file."""
    found = read_json(folder, "tokenizer.json")
    if found is None:
        return None
    model, added = found.get("model"), found.get("added_tokens") or []
    ids = {str(one.get("content")): one.get("id") for one in added if isinstance(one, dict)}
    return (model.get("vocab") if isinstance(model, dict) else None), ids
