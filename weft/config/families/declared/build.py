"""From config.json to a ``ModelSpec``, by the row of the architecture."""

from __future__ import annotations

import re
from typing import Any

from weft.config.families.common import Defaults, decoder_spec, layer_count, text_facts
from weft.config.families.declared.class_defaults import class_defaults
from weft.config.families.declared.readers import plain_activation
from weft.config.families.declared.ropes import RopeInput
from weft.config.families.declared.row import Row, flag
from weft.config.families.declared.rows import ROWS, TEXT_ROWS, TIED, WRAPPERS
from weft.config.families.declared.sections import flat_text
from weft.config.families.deepseek import with_mtp
from weft.config.families.facts import MOST_PARTS, WITHOUT_EFFECT, Facts
from weft.config.parts.traits import AttentionSpec
from weft.config.spec import ModelSpec

_HARMLESS = re.compile(
    r"""
    # identity and files
    model_type | architectures | transformers_version | _\w+ | auto_map | (torch_)?dtype | torchscript
    | quantization_config | compression_config | expert_dtype | language | license | name_or_path
    # sizes that only files of training, or of other runtimes, read
    | initializer_\w+ | \w*init_(std|range|method\w*) | \w*_(dropout\w*|pdrop) | \w*dropout(_rate|_prob)?
    | (model_)?max_(seq|sequence)_(len|length) | seq_length | model_max_length | tokenizer_model_max_length
    | ignored?_index | (use_)?(bf16|fp16|fp32|bfloat16) | (num_)?logits_to_keep | ep_size
    | use_cache | cache_implementation | gradient_checkpointing | use_flash_attn\w* | flash_attn\w*
    | attn_implementation | pretraining_tp | tp_plan | pp_plan | fused\w* | recompute\w*
    # tools that changed the file
    | unsloth_\w+ | (\w+_)?version | model_name | base_model\w* | author | date | merge_\w+
    | neftune_\w+ | lora_(alpha|dropout) | padding_side | model_parallel | \w*batch_size
    # losses
    | loss_(type|function) | \w*aux_loss\w* | seq_aux | output_router_logits | router_jitter_noise
    | \w*z_loss\w*
    # tokens, and defaults of generation and of classifiers
    | \w+_token(_id|_ids|_index)? | (id2label|label2id|num_labels|problem_type|finetuning_task|prefix)
    | output_(hidden_states|attentions) | return_dict\w* | use_return_dict | chunk_size_feed_forward
    | task_specific_params | keys_to_ignore_at_inference | pruned_heads | tokenizer_class
    | (max|min)_length | do_sample | early_stopping | num_beams | num_beam_groups | diversity_penalty
    | temperature | top_k | top_p | typical_p | repetition_penalty | length_penalty | no_repeat_ngram_size
    | encoder_no_repeat_ngram_size | bad_words_ids | num_return_sequences | forced_\w+ | remove_invalid_values
    | exponential_decay_length_penalty | suppress_tokens | begin_suppress_tokens | tie_encoder_decoder
    | cross_attention_hidden_size | bos_id | eos_id
    """,
    re.VERBOSE,
)
"""Names of fields without effect on results, in any architecture."""
_COMPUTATION = re.compile(
    r"(?:^|_)(?:act|alibi|attn|attention|audio|beta|bias|bits|block|cap|chunk|clip|compress|conv|delta|depth|dim"
    r"|dual|embed|engram|eps|expert|factor|ff|gate|glu|group|hash|head|hidden|hybrid|hyper|image|index|inter|kernel"
    r"|key|kv|latent|layer|linear|local|logit|lora|loop|mamba|mask|memory|mlp|moe|mtp|mup|multipl|nextn|norm"
    r"|parallel|partial|pattern|pos|proj|quant|query|rank|recur|resid|rms|rope|rotary|rout|scal|shar|sink|slid|soft"
    r"|sparse|ssm|state|swi|temperature|theta|tie|topk|value|video|vision|width|window)"
)
"""Beginnings of words in names of fields that may describe a computation."""


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of an architecture with a row. Raise ConfigError.

    A field of config.json is refused unless the row's readers read the field, the name is harmless, the value
    is the default of the configuration class, or a tool added the field (``_of_a_tool``).
    """
    return _read(ROWS[facts.get("architectures")[0]], facts, override)


def build_text_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of the text model of an architecture with a tower.

    ``text_config`` names the row by its ``model_type``. Raise ConfigError; see ``build_spec``.
    """
    text = _text_facts(facts)
    kind = text.get("model_type")
    known = WRAPPERS[facts.get("architectures")[0]]
    if kind not in known:
        raise text.fail("model_type", f"{kind!r} is not supported; there are: {', '.join(known)}")
    return _read(TEXT_ROWS[kind], text, override)


def _read(row: Row, facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec by ``row``. Raise ConfigError for a field that may change results, and is not read."""
    known = class_defaults()[row.config]
    for name in row.stated:
        facts.integer(name)
    renamed = {**known.renamed, **row.renamed}
    fields = {renamed.get(name, name): value for name, value in known.fields.items()}
    full = facts.completed(fields, renamed)
    spec = _spec(row, full, override)
    refuse_others(row, full, fields)
    return spec


def _text_facts(facts: Facts) -> Facts:
    """Return the fields of ``text_config``, with the fields that the outer configuration completes."""
    text = facts.get("text_config")
    text = flat_text(facts) if text is None else text
    if facts.get("architectures")[0] in TIED and isinstance(text, dict):
        # Files of earlier releases leave out the field for a head of its own, too. The weights decide.
        text = {"tie_word_embeddings": not _has_head(facts), **text}
    facts.get("vision_config")  # the tower is read elsewhere
    return text_facts(facts, text, f"{facts.file} (text_config)")


def _has_head(facts: Facts) -> bool:
    """Return True if a tensor of the checkpoint is an output head."""
    return any(name.startswith("lm_head.") or ".lm_head." in name for name in facts.weights or ())


def _spec(row: Row, facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec by the row's traits and readers. Raise ConfigError."""
    layers = layer_count(facts, override)
    window, types = row.windows(facts, layers)
    heads = facts.integer("num_attention_heads")
    theta = class_defaults()[row.config].theta
    given = RopeInput(
        head_dim=facts.integer("head_dim", facts.integer("hidden_size") // heads),
        max_position=facts.integer("max_position_embeddings"),
        theta=10000.0 if theta is None else theta,
        partial=row.partial,
        types=types,
    )
    ropes = row.ropes(facts, given)
    spec = decoder_spec(
        facts,
        family="declared",
        layers=layers,
        # Without dense layers there may be no size for them.
        defaults=Defaults(intermediate=facts.get("moe_intermediate_size")),
        window=window,
        types=types,
        qkv_bias=flag(row.qkv_bias, facts),
        o_bias=flag(row.o_bias, facts),
        mlp_bias=flag(row.mlp_bias, facts),
        qk_norm=flag(row.qk_norm, facts),
        norms=row.norms,
        centred_norms=row.centred_norms,
        gated=row.gated,
        activation=facts.activation() if row.gated else plain_activation(facts),
        rope=ropes.rope,
        ropes=ropes.more,
        attention=AttentionSpec(
            norm=row.norm_over if flag(row.qk_norm, facts) else "head",
            interleaved=row.interleaved,
            rope_of=ropes.rope_of,
        ),
        moe=None if row.experts is None else row.experts(facts, layers),
    )
    for change in row.change:
        spec = change(facts, spec)
    if row.modules and spec.layers == layer_count(facts, None):
        # The modules continue the last layer, so a model cut to fewer layers has none.
        modules = facts.integer("num_nextn_predict_layers", 0, low=0, high=MOST_PARTS)
        spec = with_mtp(spec, modules) if modules else spec
    return spec


def refuse_others(row: Row, facts: Facts, defaults: dict[str, Any]) -> None:
    """Raise ConfigError for an unread field that may change results."""
    for name, values in row.only.items():
        value = facts.get(name)
        if name in facts and not any(value == one and type(value) is type(one) for one in values):
            raise facts.fail(name, f"= {value!r} is not supported by this version")
    for name, value in facts.unread().items():
        unused = any(re.fullmatch(pattern, name) for pattern in row.unused)
        if _HARMLESS.fullmatch(name) or unused:
            continue
        if name in defaults and _equal(value, defaults[name]):
            continue
        if name in WITHOUT_EFFECT:
            if value in WITHOUT_EFFECT[name]:
                continue
        elif value is None or (name not in defaults and _off(value)):
            continue  # an unset field, or a feature of another architecture that is switched off
        elif _of_a_tool(facts, name):
            continue
        raise facts.fail(name, f"= {value!r} is not supported by this version")


def _of_a_tool(facts: Facts, name: str) -> bool:
    """Return True for a field that a tool added, such as ``is_llama_config`` or ``trained_with``.

    transformers ignores a field that the configuration class does not have. A checkpoint with its own code
    may read any field, so there no such field is accepted. A name with a word of a computation may be meant
    for another program, with other results, and is refused as well.
    """
    return not facts.get("auto_map") and _COMPUTATION.search(name) is None


def _off(value: Any) -> bool:
    """Return True for false and for empty values. The number 0 may be a setting."""
    return value is False or (isinstance(value, str | list | dict) and not value)


def _equal(value: Any, default: Any) -> bool:
    """Return True for equal values. True and 1 differ, 1 and 1.0 do not."""
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)
