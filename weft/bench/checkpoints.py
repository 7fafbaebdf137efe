"""Checkpoints with random weights in Hugging Face's format, made on demand: speed needs no training."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench import gpt_oss
from weft.bench.bench_tokenizer import SPECIAL, VISION, write_tokenizer
from weft.common.errors import ConfigError
from weft.common.folder import expanded
from weft.common.progress import progress_bar

if TYPE_CHECKING:
    import torch

VOCAB = 16_384
MAX_POSITION = 40_960
_MARK = "weft_bench.json"
"""Name of the file that is written last, and records the origin of the folder."""
_FORMAT = 2
"""Format number; increased when the same name and seed give other files."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB - len(SPECIAL) + 1,
    "pad_token_id": VOCAB - 1,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One checkpoint: its architecture, and the part of config.json beyond ``_COMMON``."""

    name: str
    about: str
    model_type: str
    config: dict[str, Any]
    extra: dict[str, Any]
    """Fields added to config.json after saving: ``transformers`` omits these, but other engines need them."""
    processor: dict[str, Any] | None = None
    """preprocessor_config.json of a model with images; None for text models."""

    @property
    def needs_transformers(self) -> bool:
        return self.model_type not in ("qwen3", "gpt_oss")


# The standard deviations (initializer_range) keep greedy answers out of loops of a few tokens. A loop would
# send all tokens to the same experts.
_QWEN3_DENSE = {
    "initializer_range": 0.04,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
}
_DEEPSEEK_MOE = {
    "initializer_range": 0.06,
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 1536,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_QWEN3_NEXT = {
    "initializer_range": 0.02,
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 192,
    "intermediate_size": 512,
    "norm_topk_prob": True,
}
_GPT_OSS = {
    "initializer_range": 0.06,
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
}
_QWEN3_VL = {
    "text_config": {
        **_COMMON,
        **_QWEN3_DENSE,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "initializer_range": 0.04,
        "depth": 12,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_heads": 6,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 768,
        "num_position_embeddings": 1024,
        "deepstack_visual_indexes": [3, 6, 9],
    },
    **dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            range(VOCAB - len(SPECIAL) - len(VISION), VOCAB - len(SPECIAL)),
            strict=True,
        )
    ),
}
_QWEN3_VL_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65_536, "longest_edge": 4_194_304},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_NOAUX = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_theta": 10_000.0,
}

_ROPE = {"rope_theta": 1_000_000.0}
_ARCHITECTURES = {
    kind: {"architectures": [architecture], "model_type": kind}
    for kind, architecture in (
        ("qwen3", "Qwen3ForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("qwen3_next", "Qwen3NextForCausalLM"),
    )
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("qwen3-dense-s", "Qwen3, dense, 108M parameters", "qwen3", _QWEN3_DENSE, {}),
        Recipe(
            "deepseek-moe-s",
            "DeepSeek-V3 (latent attention 128 + 32, 32 experts), 117M",
            "deepseek_v3",
            _DEEPSEEK_MOE,
            _NOAUX,
        ),
        Recipe(
            "deepseek-moe-k576",
            "the same with a latent of 512 + 64 (DeepSeek's own size), 122M",
            "deepseek_v3",
            {**_DEEPSEEK_MOE, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            _NOAUX,
        ),
        Recipe(
            "qwen3next-s",
            "Qwen3-Next (gated delta net, every fourth layer attends, 32 experts), 103M",
            "qwen3_next",
            _QWEN3_NEXT,
            {
                "full_attention_interval": 4,
                "decoder_sparse_step": 1,
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
            },
        ),
        Recipe(
            "gpt-oss-s",
            "GPT-OSS (sinks, every second layer slides, 32 experts in MXFP4), 123M",
            "gpt_oss",
            _GPT_OSS,
            {},
        ),
        Recipe(
            "qwen3vl-s",
            "Qwen3-VL (qwen3-dense-s, a tower of 12 layers with deepstack), 140M",
            "qwen3_vl",
            _QWEN3_VL,
            {},
            _QWEN3_VL_PROCESSOR,
        ),
    )
}


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a text model of ``RECIPES``, as engines read it. Used for dummy weights."""
    recipe = _recipe(name)
    return {**_COMMON, **_ROPE, **recipe.config, **recipe.extra, **_ARCHITECTURES[recipe.model_type]}


def make(name: str, folder: str | Path, seed: int = 0, *, progress: bool = True) -> Path:
    """Write the checkpoint ``name`` (bfloat16) to ``folder`` unless present. Return the folder.

    The folder appears complete or not at all. Raise ConfigError for an unknown name, for a folder with other
    content, and if ``transformers`` is needed but not installed.
    """
    recipe = _recipe(name)
    target = expanded(folder).absolute()
    mark = {"name": name, "seed": seed, "format": _FORMAT}
    if _is_there(target, mark):
        return target
    writer: Callable[[Recipe, Path, int, Any], None] = _with_torch
    if recipe.needs_transformers:
        _require_transformers(name)
        writer = _with_transformers
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write to a hidden folder beside the target, then rename: readers never see half a checkpoint.
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with progress_bar(title=name, unit="tensor", shown=progress) as bar:
            writer(recipe, made, seed, bar)
        _finish(recipe, made)
        (made / _MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
        made.chmod(0o755)
        for file in made.iterdir():
            file.chmod(0o644)
        _publish(made, target, mark)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"unknown checkpoint {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]


def _is_there(target: Path, mark: dict[str, Any]) -> bool:
    """Return True if ``target`` is the checkpoint, False if absent or empty. Raise ConfigError for other
    content."""
    try:
        if not any(target.iterdir()):
            return False
        found = json.loads((target / _MARK).read_text(encoding="utf-8"))
    except NotADirectoryError:
        found = None
    except FileNotFoundError:
        if not target.exists():
            return False
        found = None
    except ValueError:
        found = None
    # Equal except for the format: the same checkpoint, made by another version of the recipe code.
    if isinstance(found, dict) and {**found, "format": _FORMAT} == mark != found:
        raise ConfigError(
            f"the folder {target.name!r} was made by another version of Weft: remove the folder"
        )
    if found != mark:
        raise ConfigError(
            f"the folder {target.name!r} has other contents: use another folder, or remove the folder"
        )
    return True


def _publish(made: Path, target: Path, mark: dict[str, Any]) -> None:
    """Rename ``made`` to ``target``.

    Accept an equal checkpoint by another process; raise OSError or ConfigError for other content.
    """
    try:
        os.replace(made, target)
    except OSError:
        # Another process was faster, with the same result.
        if not _is_there(target, mark):
            raise


def _finish(recipe: Recipe, folder: Path) -> None:
    """Write the files beside the weights, and complete config.json for engines."""
    write_tokenizer(folder, VOCAB, MAX_POSITION, vision=recipe.processor is not None)
    if recipe.processor is not None:
        _write_json(folder / "preprocessor_config.json", recipe.processor)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _write_json(path, {**config, **recipe.extra, "torch_dtype": "bfloat16"})
    generation = {"eos_token_id": _COMMON["eos_token_id"], "pad_token_id": _COMMON["pad_token_id"]}
    _write_json(folder / "generation_config.json", {**generation, "do_sample": False})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _require_transformers(name: str) -> None:
    """Raise ConfigError if ``transformers`` is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{name} requires transformers: pip install 'weft[reference]' (qwen3-dense-s and gpt-oss-s "
            "do not)"
        ) from None


def _with_transformers(recipe: Recipe, folder: Path, seed: int, bar: Any) -> None:
    """Write the weights and the config of a model with random weights made by ``transformers``.

    ``bar`` counts the parameters. Torch's random state is kept.
    """
    import torch
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    sees = recipe.processor is not None
    common = {} if sees else _COMMON
    config = library.AutoConfig.for_model(recipe.model_type, **{**common, **recipe.config})
    kind = library.AutoModelForImageTextToText if sees else library.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Drawn in float32: the drawing of bfloat16 may differ between versions.
        model = kind.from_config(config, dtype=torch.float32)
    bar.total = sum(1 for _ in model.parameters())
    bar.refresh()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        bar.update()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)


def _with_torch(recipe: Recipe, folder: Path, seed: int, bar: Any) -> None:
    """Write the weights and the config of a model with random weights made by torch alone.

    ``bar`` counts the tensors.
    """
    import torch
    from safetensors.torch import save_file

    config = {**_COMMON, **recipe.config}
    std = config["initializer_range"]
    source = torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        made: torch.Tensor = torch.randn(shape, generator=source) * std
        return made

    published = recipe.model_type == "gpt_oss"
    bar.total = len(gpt_oss.shapes(config) if published else qwen3_shapes(config))
    bar.refresh()
    tensors: dict[str, torch.Tensor] = {}
    for some in gpt_oss.tensors(config, drawn) if published else _qwen3(config, drawn):
        tensors |= some
        bar.update()
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    _write_json(folder / "config.json", {**config, **(gpt_oss.ABOUT if published else _QWEN3_ABOUT)})


_QWEN3_ABOUT = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "rope_theta": 1_000_000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "use_cache": True,
    "use_sliding_window": False,
}


def _qwen3(
    config: dict[str, Any], drawn: Callable[[tuple[int, ...]], torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each tensor of a dense Qwen3 by name, in bfloat16. ``drawn`` makes float32 values of a shape."""
    import torch

    for name, shape in qwen3_shapes(config).items():
        tensor = torch.ones(shape) if len(shape) == 1 else drawn(shape)
        yield {name: tensor.to(torch.bfloat16)}


def qwen3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name to shape of every tensor of a dense Qwen3, in the order of layers."""
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
