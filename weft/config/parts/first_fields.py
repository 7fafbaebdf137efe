"""Fields of model specs in the first release whose caches move to and from later releases.

The table never grows. A fingerprint has these fields always, and every later field only where the field
differs from its default: see ``weft.config.fingerprint``.
"""

from __future__ import annotations

FIRST_FIELDS: dict[str, frozenset[str]] = {
    name: frozenset(fields.split())
    for name, fields in {
        "ModelSpec": (
            "family architecture vocab_size hidden layers heads kv_heads head_dim intermediate activation "
            "norm_eps rope tied head qkv_bias o_bias mlp_bias qk_norm centred_norms output_gate sinks moe "
            "mla index delta sparse hyper mtp_layers caches max_position eos_ids bos_id dtype quantized "
            "vision"
        ),
        "RopeSpec": (
            "kind theta dim factor original_max_position max_position low_freq_factor high_freq_factor "
            "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate sections interleaved"
        ),
        "MoESpec": (
            "experts top_k intermediate renormalize layers scoring correction groups top_groups "
            "group_rule scale shared shared_gate limit alpha bias hash_layers"
        ),
        "MLASpec": "q_lora kv_lora nope rope v scale interleaved bias norm_eps",
        "IndexSpec": "layers heads dim top interleaved",
        "DeltaSpec": "layers k_heads v_heads k_dim v_dim conv",
        "SparseSpec": (
            "types window chosen_ratio all_ratio q_lora o_groups o_lora index_heads index_dim index_top "
            "group_rope"
        ),
        "HyperSpec": "streams iterations eps",
        "CacheSpec": "kind layers window kv_heads head_dim width ratio parts form fp8 exact",
        "StatePart": "name shape wide",
        "QuantizedSpec": "method block zero_offset bits expert_bits",
        "VisionSpec": (
            "kind hidden layers heads intermediate activation output side frames levels theta norm_eps media"
        ),
        "MediaFacts": (
            "kind patch temporal merge min_pixels max_pixels max_patches max_side resample rescale mean "
            "std placeholder video start end frames"
        ),
        "VideoFacts": "min_pixels max_pixels fps frame_tokens",
    }.items()
}
"""Name of a struct -> its fields in the first release. A later struct has no entry."""
