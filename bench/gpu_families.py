"""Measure one captured decode step of other families than Llama on one GPU: time, kernels per layer.

python -m bench.gpu_families --json families.json

Each model has random weights and 8 layers of a published shape: Qwen3-30B-A3B, DeepSeek-V3 (1 dense layer
and 64 of 256 experts, so that the weights fit one GPU), DeepSeek-V3.2 in the same form (a token chooses among
more than 2,048: use --context 4096), Qwen3-Next, Nemotron-H-8B (layers of one part), Falcon-H1-7B and
LFM2-1.2B. The prompts have ``--context`` tokens. The wall time comes from greedy steps without a profiler.
Kernels come from later steps under torch's profiler and include sampling.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import record
from bench.gpu import DUMMY, setting
from bench.gpu_steps import Steps
from bench.load import engine

LAYERS = 8
_COMMON: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rope_theta": 10000.0,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000000.0,
    },
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hybrid_override_pattern": "M-M-M*M-",  # eight published layers of one part each
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
    "falcon-h1-7b": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_state": 256,
        "rope_theta": 1e11,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"],
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
}
SHAPES["deepseek-v32"] = SHAPES["deepseek-v3"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
"""Fields of a published config.json that decide the speed of a step."""


def write(name: str, scratch: Path) -> Path:
    """Write the configuration of the shape ``name`` below ``scratch``, and return its folder."""
    folder = scratch / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[name]}), encoding="utf-8")
    return folder


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row per shape and batch size."""
    rows = []
    for name, figures in found.items():
        rows.append(
            {
                "shape, rows": name,
                "ms a step": f"{figures['ms_per_step']:.2f}",
                "ms of the GPU": f"{figures['gpu_ms']:.2f}",
                "kernels and copies": f"{figures['kernels']:.0f}",
                "a layer": f"{figures['kernels'] / LAYERS:.1f}",
            }
        )
    return record.markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="all by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each row")
    parser.add_argument("--steps", type=int, default=40, help="measured steps")
    parser.add_argument(
        "--set", action="append", type=setting, default=[], help="setting of the engine, NAME=VALUE"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_families needs a CUDA GPU, and this torch sees none")
    settings = {
        **DUMMY,
        "max_num_seqs": max(args.rows),
        "max_num_batched_tokens": 2048,
        "max_model_len": args.context + args.steps + 64,
        "kv_cache_memory": "4G",
        **dict(args.set),
    }
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in tqdm(args.shape or SHAPES, unit="shape"):
            core = engine(str(write(name, Path(scratch))), 0, **settings)
            steps = Steps(core, args.context)
            for rows in args.rows:
                found[f"{name}, {rows}"] = steps.measure(rows, "greedy", args.steps)
            core.close()
            del core, steps
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    print(table(found))
    if args.json:
        title = f"Decode steps of {LAYERS} layers by family, {device}"
        numbers = {"device": device, "settings": dict(args.set), "steps": found}
        record.write(args.json, "bench.gpu_families", title, table(found), numbers)


if __name__ == "__main__":
    main()
