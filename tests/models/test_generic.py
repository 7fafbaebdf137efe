"""The generic backend against transformers: tokens, refusals, ranks, quantized weights, names."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.conftest import Paged
from tests.models.test_quantized_loading import FORMATS, _folders, save_moe
from tests.support.generic_models import classes, full_name, greedy, tiny_config, tiny_model
from tests.support.generic_table import CLOSE, NEW, WRONG, generated, judge, logits_of, prompts_of
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.families.generic import probing
from weft.config.sizing.memory import weight_bytes
from weft.config.spec import ModelSpec
from weft.models.generic import recognition, self_check
from weft.models.generic.attention import rotation_of
from weft.models.generic.interface import Distances
from weft.models.generic.load import load
from weft.models.generic.masks import classify
from weft.models.generic.model import TransformersModel
from weft.models.generic.parallel import division_of
from weft.models.generic.probe import probe_folder, run_probe
from weft.models.generic.recognition import expert_sizes, gate_of, is_experts, mlp_of
from weft.models.generic.skeleton import make_skeleton, read_config
from weft.models.loader import load_model
from weft.ops.moe import Gate
from weft.parallel.comm import drive
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout

CPU = torch.device("cpu")
F64 = torch.float64
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "transformers.md"


def saved(folder: Path, name: str, **more: Any) -> Any:
    """Save a tiny model and return the model."""
    model = tiny_model(name, **more)
    model.save_pretrained(folder)
    return model


def spec_of(folder: Path, name: str) -> ModelSpec:
    return probe_folder(str(folder), full_name(name))


def opened(folder: Path, name: str, dtype: torch.dtype = F64, **more: Any) -> Any:
    return load(str(folder), spec_of(folder, name), dtype, CPU, progress=False, **more)


def probed(folder: Path, architecture: str, layers: int | None) -> probing.Probed:
    """Return the result of a probe without a process."""
    return probing.Probed(spec=probe_folder(str(folder), architecture, layers))


def assert_close(found: torch.Tensor, expected: torch.Tensor, limit: float = CLOSE) -> None:
    assert (found - expected).abs().max() <= limit * expected.abs().max()


@mostly_slow(
    "name",
    [
        *("Bloom", "DeepseekV3", "Falcon", "Gemma2", "Gemma3", "Glm4Moe", "GPT2LMHeadModel", "GPTNeo"),
        *("Granite", "Mpt", "OPT"),
    ],
    ["Glm4Moe", "Bloom", "GPT2LMHeadModel"],
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, name)
    prompts = prompts_of(31, 7, 12)
    expected = [greedy(reference, prompt, NEW) for prompt in prompts]
    assert generated(opened(tmp_path, name), prompts, NEW) == expected


def test_facts_come_from_attention_calls(tmp_path: Path) -> None:
    saved(tmp_path, "Gemma4")
    caches = spec_of(tmp_path, "Gemma4").caches
    assert [(one.window, one.kv_heads, one.head_dim, one.layers) for one in caches] == [
        (7, 2, 16, (0, 1)),
        (0, 2, 32, (2,)),
    ]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda b, h, q, k: k <= q, "full"),
        (lambda b, h, q, k: (k <= q) & (k > q - 10_000), "window:10000"),
        (lambda b, h, q, k: (k <= q) & (k > q - 40_000), "full"),
        (lambda b, h, q, k: (k <= q) & (k // 8192 == q // 8192), "chunk:8192"),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), "window:7"),
        (lambda b, h, q, k: (k <= q) & (k // 64 == q // 64), "chunk:64"),
        (lambda b, h, q, k: k > -1, "bidirectional"),
        (lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 4)), "other"),
        (lambda b, h, q, k: (k <= q) & (k % 2 == q % 2), "other"),
    ],
)
def test_masks_are_classified(function: Any, kind: str) -> None:
    assert classify(function, 40_000) == kind


def test_a_long_window_is_no_full_attention(tmp_path: Path) -> None:
    saved(tmp_path, "Starcoder2", sliding_window=10_000, max_position_embeddings=40_000)
    assert [one.window for one in spec_of(tmp_path, "Starcoder2").caches] == [10_000]


@pytest.mark.parametrize("limit", [5.0, 10.0, 100.0, None])
def test_a_block_that_cuts_off_values_stays_as_published(limit: float | None) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
            self.down_proj = torch.nn.Linear(24, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate_proj(x) if limit is None else self.gate_proj(x).clamp(max=limit)
            return self.down_proj(torch.nn.functional.silu(gate) * self.up_proj(x))

    assert mlp_of(Block()) == (("silu", False) if limit is None else None)


@pytest.mark.parametrize("limit", [8.0, 100.0, None])
def test_attention_that_cuts_off_values_keeps_its_code(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = transformers.models.llama.modeling_llama
    plain = module.apply_rotary_pos_emb

    def cut(q: Any, k: Any, *given: Any, **more: Any) -> Any:
        return plain(q.clamp(-limit, limit), k.clamp(-limit, limit), *given, **more)

    if limit is not None:
        monkeypatch.setattr(module, "apply_rotary_pos_emb", cut)
    model = make_skeleton(tiny_config("Llama"), "LlamaForCausalLM", F64)
    found = rotation_of(model.model.layers[0].self_attn, 16)
    assert (found is None) == (limit is not None)


def test_a_gate_with_limits_is_recognized() -> None:
    config = tiny_config("MiniMaxM3VL")
    model = make_skeleton(config, "MiniMaxM3VLForCausalLM", F64)
    experts = next(module for module in model.modules() if is_experts(module))
    assert gate_of(experts) == Gate("silu", limit=config.swiglu_limit, alpha=config.swiglu_alpha)
    experts.swiglu_limit = experts.limit = 0.5
    found = gate_of(experts)
    assert found is not None
    assert found.limit == 0.5


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Lfm2Moe", {}, r"interface: 0, 2 \(Lfm2MoeShortConv: a convolution over tokens\)"),
        ("Mamba", {}, r"0, 1, 2 \(MambaMixer: a recurrent state and a convolution over tokens\)"),
        ("Jamba", {}, r"0, 2 \(JambaMambaMixer: a recurrent state"),  # the pass reads the values of a mask
        pytest.param(
            "JetMoe",
            {},
            r"JetMoeTopKGating \(`expert_size = expert_size.tolist\(\)`\) reads values of tensors",
            marks=pytest.mark.slow,
        ),
        ("DiffLlama", {}, "a layer attends twice"),
        ("Bart", {}, "attention to the outputs of an encoder"),
        ("Camembert", {}, "attention to later tokens"),
        ("Falcon", {"alibi": True}, r"\(ALiBi\) that the class rounds to 16 bits"),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 4.0,
                    "rope_theta": 10000.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_type 'dynamic' rotates by the longest row of a step",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    saved(tmp_path, name, **changes)
    with pytest.raises(ConfigError, match=reason):
        opened(tmp_path, name)


def test_code_of_a_checkpoint_stays_unknown(tmp_path: Path) -> None:
    saved(tmp_path, "Llama")
    path = tmp_path / "config.json"
    code = {"AutoModel": "modeling.Evil"}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "auto_map": code, "more": {"auto_map": code}})
    )
    config = read_config(str(tmp_path))
    assert config.more == {}
    assert not hasattr(config, "auto_map")


def test_state_outside_of_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that attends and also looks at the token before passes the probe, not the self check."""
    saved(tmp_path, "Llama")
    cls = transformers.models.llama.modeling_llama.LlamaMLP
    plain = cls.forward

    def leaky(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(cls, "forward", leaky)
    with pytest.raises(ConfigError, match="a sequence in pieces differs from the whole sequence"):
        opened(tmp_path, "Llama")


def test_a_small_state_is_found_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference between whole and pieces is below the limit of 16 bits."""
    saved(tmp_path, "Llama")
    cls = transformers.models.llama.modeling_llama.LlamaMLP
    plain = cls.forward

    def leaky(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + 0.05 * x.roll(1, dims=1))

    opened(tmp_path, "Llama", torch.bfloat16)
    monkeypatch.setattr(cls, "forward", leaky)
    with pytest.raises(ConfigError, match="outside of attention, a row changes"):
        opened(tmp_path, "Llama", torch.bfloat16)
    with pytest.raises(ConfigError, match="outside of attention, a row changes"):
        on_ranks(Layout(tensor=2), lambda mesh: opened(tmp_path, "Llama", torch.bfloat16, mesh=mesh))


@pytest.mark.parametrize(("loops", "refused"), [((), True), (("Experts",), False)])
def test_experts_in_a_loop_may_round_other_bits(loops: tuple[str, ...], refused: bool) -> None:
    """The number of rows of an expert depends on the rows beside a row."""
    model: Any = SimpleNamespace(loops=loops, dtype=torch.bfloat16, spec=SimpleNamespace(architecture="A"))
    with pytest.raises(ConfigError, match="a row changes by") if refused else nullcontext():
        self_check._check_rows(model, 0.05)


@pytest.mark.parametrize("first", [100, 511, 512])
def test_a_rotation_by_the_longest_row_is_found(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation changes when a row of the step is at position ``first`` or later, far beyond the sequences
    of the self check. Position 512 is outside of the context."""
    saved(tmp_path, "Llama")
    cls = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    plain = cls.forward

    def dynamic(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        beyond = (position_ids.max() - first + 1).clamp(min=0)
        return plain(self, x, position_ids / (1 + beyond))

    monkeypatch.setattr(cls, "forward", dynamic)
    if first == 512:
        opened(tmp_path, "Llama")
        return
    with pytest.raises(ConfigError, match="a rotation that depends on the longest row of a step"):
        opened(tmp_path, "Llama")


def test_a_bias_by_distance_is_exact_in_16_bits() -> None:
    slopes = 2.0 ** (-8 / 12 * torch.arange(1, 13).double())
    positions = torch.tensor([0, 1, 255, 256, 40_001, Distances.LAST])
    q = torch.zeros(1, 12, len(positions), 20, dtype=torch.bfloat16)
    queries, keys = (part.bfloat16() for part in Distances(slopes).dims(q, 0.25, positions))
    assert queries.shape[2] == keys.shape[1] == 12  # 20 + 12 is a multiple of 16
    found = 0.25 * queries[:, 0].double() @ keys.double().T
    # Two numbers of 8 bits have the slope, and every position is exact.
    torch.testing.assert_close(found, slopes[:, None] * positions, rtol=2**-16, atol=0)


def test_positions_in_keys_are_not_rounded_to_8_bits(tmp_path: Path) -> None:
    saved(tmp_path, "Bloom")
    spec = spec_of(tmp_path, "Bloom")
    assert [(one.head_dim, one.kv_heads) for one in spec.caches] == [(16, 4)]  # 12 dims and 4 of the bias
    caches = tuple(msgspec.structs.replace(one, fp8=True) for one in spec.caches)
    with pytest.raises(ConfigError, match="contain positions"):
        load(str(tmp_path), msgspec.structs.replace(spec, caches=caches), F64, CPU, progress=False)


def test_facts_of_scores_reach_the_choice_of_a_backend(tmp_path: Path) -> None:
    """FlashInfer has no sinks and no softcap: the spec must name both."""
    for name, sinks, softcap in (("GptOss", True, 0.0), ("Gemma2", False, 50.0)):
        saved(tmp_path / name, name)
        spec = spec_of(tmp_path / name, name)
        assert (spec.sinks, spec.scales.attention_softcap) == (sinks, softcap)


def test_attention_unlike_that_of_transformers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "Llama")
    module = transformers.models.llama.modeling_llama
    plain = module.eager_attention_forward

    def other(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **more: Any) -> Any:
        return plain(module, q, k, v, mask, 1.5 * scaling, **more)

    monkeypatch.setattr(module, "eager_attention_forward", other)
    with pytest.raises(ConfigError, match="differs from the attention of transformers"):
        opened(tmp_path, "Llama")
    with pytest.raises(ConfigError, match="differs from the attention of transformers"):
        on_ranks(Layout(tensor=2), lambda mesh: opened(tmp_path, "Llama", mesh=mesh))


def test_code_that_counts_the_heads_of_all_ranks_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks the model is served after the other comparisons. On one rank the error is an error."""
    saved(tmp_path, "Llama")
    noted = list[str]()
    monkeypatch.setattr(self_check.log, "info", lambda form, *values: noted.append(form % values))

    def counts(*_: Any) -> Any:
        raise RuntimeError("shape '[1, 21, 4, 12]' is invalid")

    monkeypatch.setattr(TransformersModel, "published_hidden", counts)
    on_ranks(Layout(tensor=2), lambda mesh: opened(tmp_path, "Llama", mesh=mesh))
    expected = "the comparison with the attention of transformers in the self check needs one rank: shape"
    assert sum(expected in line for line in noted) == 2
    with pytest.raises(ConfigError, match="is invalid"):
        opened(tmp_path, "Llama")


def test_a_buffer_that_nothing_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "Llama")
    cls = transformers.models.llama.modeling_llama.LlamaMLP
    plain = cls.__init__

    def with_table(self: Any, config: Any) -> None:
        plain(self, config)
        self.register_buffer("table", torch.arange(3), persistent=False)

    monkeypatch.setattr(cls, "__init__", with_table)
    with pytest.raises(ConfigError, match=r"does not compute the buffer model.layers.0.mlp.table"):
        opened(tmp_path, "Llama")


@mostly_slow(
    "name",
    [
        *("Bloom", "DeepseekV3", "Emu3", "Gemma2", "Gemma3", "GPT2LMHeadModel", "GptOss", "GraniteMoe"),
        *("MiMoV2Flash", "Olmo2", "OPT", "Phi3", "Qwen2Moe"),
    ],
    ["Qwen2Moe", "Bloom"],
)
def test_ranks_compute_the_logits_of_one(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    expected = logits_of(opened(tmp_path, name))
    found = on_ranks(Layout(tensor=2), lambda mesh: logits_of(opened(tmp_path, name, mesh=mesh)))
    assert torch.equal(found[0], found[1])
    assert_close(found[0], expected)


@mostly_slow("quantization", ["int8", "w8a8", "int4", "w4a8"], ["w8a8"])
def test_ranks_round_experts_like_one(quantization: str, tmp_path: Path) -> None:
    """Ranks that divide the inner rows of experts round weights and rows of x as one rank does."""
    sizes = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    saved(tmp_path, "Qwen2Moe", **sizes)
    expected = logits_of(opened(tmp_path, "Qwen2Moe", quantization=quantization))
    found = on_ranks(
        Layout(tensor=2),
        lambda mesh: logits_of(opened(tmp_path, "Qwen2Moe", quantization=quantization, mesh=mesh)),
    )
    assert_close(found[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_ranks_share_kv_heads(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name, num_key_value_heads=1)
    expected = logits_of(opened(tmp_path, name))
    found = on_ranks(Layout(tensor=2), lambda mesh: logits_of(opened(tmp_path, name, mesh=mesh)))
    assert_close(found[0], expected)


def test_recognized_modules_need_no_plan(tmp_path: Path) -> None:
    saved(tmp_path, "GraniteMoe")
    config = read_config(str(tmp_path))
    assert "layers.*.self_attn.q_proj" not in (config.base_model_tp_plan or {})
    calls = run_probe(model := make_skeleton(config, "GraniteMoeForCausalLM", F64))
    assert division_of(model, calls).heads


@mostly_slow("name", ["Llama", "Olmo2", "GptOss"], ["Olmo2"])
def test_ranks_divide_caches_where_attention_is_whole(name: str, tmp_path: Path) -> None:
    """The plan of transformers divides no heads of Olmo2: its norm covers the queries of all heads."""
    saved(tmp_path, name)
    spec = spec_of(tmp_path, name)

    def work(mesh: Mesh) -> tuple[bool, list[int], int]:
        model = opened(tmp_path, name, torch.float32, mesh=mesh, pack=False)
        size = sum(weight.numel() for weight in model.parameters())
        return bool(model.cuts), [cache.kv_heads for cache in model.spec.caches], size

    for cut, kv_heads, size in on_ranks(Layout(tensor=2), work):
        assert cut == (name != "Llama")
        assert set(kv_heads) == {1}
        assert weight_bytes(spec, "float32", layout=Layout(tensor=2)) == 4 * size


def test_transposed_experts_with_alternating_rows_are_recognized() -> None:
    config = tiny_config("GptOss")
    model = make_skeleton(config, "GptOssForCausalLM", F64)
    experts = next(module for module in model.modules() if is_experts(module))
    assert gate_of(experts) == Gate("silu", limit=config.swiglu_limit, alpha=config.swiglu_alpha)
    assert expert_sizes(experts) == (6, 48, 80)
    experts.is_concatenated = True  # other rows than ``_apply_gate`` reads
    assert gate_of(experts) is None


@mostly_slow("form", list(FORMATS), ["fp8 blocks"])
def test_quantized_checkpoints_load_by_module_name(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of Weft's own implementation on the same files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    monkeypatch.setattr(probing, "run_probe", probed)
    plain = tmp_path / "plain"
    sizes = {"num_attention_heads": 4, "num_experts": 3, "moe_intermediate_size": 32}
    save_moe(plain, vocab_size=128, hidden_size=64, intermediate_size=96, **sizes)
    packed, _ = _folders(plain, tmp_path / "made", *FORMATS[form])
    own = load_spec(str(packed))
    expected = logits_of(load_model(str(packed), own, torch.float32, CPU, progress=False))
    spec = load_spec(str(packed), model_impl="transformers")
    assert spec.quantized == own.quantized
    found = logits_of(load_model(str(packed), spec, torch.float32, CPU, progress=False))
    assert_close(found, expected, 1e-3)


@mostly_slow("quantization", ["int8", "int4"], ["int4"])
def test_quantization_rounds_what_weft_rounds(quantization: str, tmp_path: Path) -> None:
    saved(tmp_path, "Qwen3", tie_word_embeddings=True)
    given = {"progress": False, "quantization": quantization}
    own = load_model(str(tmp_path), load_spec(str(tmp_path)), torch.float32, CPU, **given)
    found = logits_of(opened(tmp_path, "Qwen3", torch.float32, quantization=quantization))
    assert_close(found, logits_of(own), 1e-3)


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    saved(tmp_path, "Qwen2Moe")
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [name for name in tensors if name.endswith("layers.1.mlp.experts.2.down_proj.weight")]
    assert lost
    for name in (*lost, "model.norm.weight"):
        del tensors[name]
    tensors["model.layers.0.extra.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        opened(tmp_path, "Qwen2Moe")
    message = raised.value.message
    assert "missing: " in message
    assert lost[0] in message
    assert "model.norm.weight" in message
    assert "unexpected: model.layers.0.extra.weight" in message


def test_half_of_the_experts_is_not_enough(tmp_path: Path) -> None:
    saved(tmp_path, "Qwen2Moe")
    tensors = load_file(tmp_path / "model.safetensors")
    half = {
        name: one for name, one in tensors.items() if "layers.1.mlp.experts" not in name or "up_" not in name
    }
    assert len(half) < len(tensors)
    save_file(half, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.gate_up_proj; missing: .*up_proj"):
        opened(tmp_path, "Qwen2Moe")


def test_planned_weights_contain_the_experts(tmp_path: Path) -> None:
    size = saved(tmp_path, "Qwen2Moe").num_parameters()
    assert weight_bytes(spec_of(tmp_path, "Qwen2Moe"), "float32") == 4 * size


def test_a_saved_copy_of_a_tied_table_must_be_equal(tmp_path: Path) -> None:
    saved(tmp_path, "Gemma", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    opened(tmp_path, "Gemma")
    save_file({**tensors, "lm_head.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="set tie_word_embeddings to false"):
        opened(tmp_path, "Gemma")


@pytest.mark.slow
def test_names_without_the_base_prefix_load(tmp_path: Path) -> None:
    saved(tmp_path, "Gemma", tie_word_embeddings=True)
    expected = logits_of(opened(tmp_path, "Gemma"))
    tensors = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("model."): values for name, values in tensors.items()}
    save_file(short, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(opened(tmp_path, "Gemma")), expected)


@pytest.mark.slow
def test_a_router_that_reads_its_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = saved(tmp_path, "HunYuanMoEV1")
    prompts = prompts_of(9, 5)
    expected = [greedy(reference, prompt, 3) for prompt in prompts]
    assert generated(opened(tmp_path, "HunYuanMoEV1"), prompts, 3) == expected
    assert "loaded without" not in caplog.text


@pytest.mark.slow
def test_modules_that_read_weights_keep_the_code_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = transformers.models.llama.modeling_llama.LlamaAttention
    plain = cls.forward

    def reading(self: Any, *given: Any, **more: Any) -> Any:
        assert self.q_proj.weight.dim() == 2
        return plain(self, *given, **more)

    monkeypatch.setattr(cls, "forward", reading)
    reference = saved(tmp_path, "Llama")
    prompts = prompts_of(9, 5)
    expected = [greedy(reference, prompt, 3) for prompt in prompts]
    assert generated(opened(tmp_path, "Llama"), prompts, 3) == expected
    assert "loaded without Weft's ops" in caplog.text


def test_experts_in_a_loop_are_whole_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of transformers divides the experts, and Weft's op does not compute these experts."""
    reference = saved(tmp_path, "Qwen2Moe")
    monkeypatch.setattr(recognition, "gate_of", lambda module: None)
    prompts = prompts_of(5)
    model = opened(tmp_path, "Qwen2Moe")
    assert model.loops == ("Qwen2MoeExperts",)
    assert generated(model, prompts, 2) == [greedy(reference, prompt, 2) for prompt in prompts]
    with pytest.raises(ConfigError, match="use --tensor-parallel-size 1"):
        on_ranks(Layout(tensor=2), lambda mesh: opened(tmp_path, "Qwen2Moe", mesh=mesh))


@pytest.mark.slow
def test_models_in_two_threads_do_not_meet(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("Llama", "Gemma")}
    models = {}
    for name, folder in folders.items():
        saved(folder, name)
        models[name] = opened(folder, name)
    expected = {name: logits_of(model) for name, model in models.items()}
    found = dict[str, list[torch.Tensor]]()

    def work(name: str) -> None:
        found[name] = [logits_of(models[name]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in models:
        assert all(torch.equal(one, expected[name]) for one in found[name])


@pytest.mark.slow
def test_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    saved(tmp_path, "Gemma3")
    spec = spec_of(tmp_path, "Gemma3")
    expected = logits_of(opened(tmp_path, "Gemma3", torch.float32))
    caches = tuple(msgspec.structs.replace(one, fp8=True) for one in spec.caches)
    fp8 = msgspec.structs.replace(spec, caches=caches)
    model = load(str(tmp_path), fp8, torch.float32, CPU, progress=False)
    assert_close(logits_of(model), expected, 0.3)


def test_deterministic_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "Gemma")
    with pytest.raises(ConfigError, match="--deterministic"):
        opened(tmp_path, "Gemma", invariant=True)


@pytest.mark.slow
def test_fewer_layers(tmp_path: Path) -> None:
    saved(tmp_path, "Gemma3")
    spec = probe_folder(str(tmp_path), "Gemma3ForCausalLM", 2)
    assert [one.layers for one in spec.caches] == [(0,), (1,)]
    load(str(tmp_path), spec, F64, CPU, "dummy", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", classes())
def test_every_class_is_served_or_refused(name: str, tmp_path: Path) -> None:
    """Tokens are those of transformers, or a reason stands. The page has the same result."""
    verdict = judge(name, str(tmp_path))
    assert verdict.result != WRONG
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(f"| {name} | {verdict.result} | {verdict.ranks} |") for line in lines)


@torch.no_grad()
@mostly_slow(("name", "ranks"), [("Persimmon", 1), ("Llama", 1), ("Llama", 2)], [("Persimmon", 1)])
def test_a_classifier_gives_the_numbers_of_transformers(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "run_probe", probed)
    config = tiny_model(name).config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    reference = getattr(transformers, f"{name}ForSequenceClassification")(config).double().eval()
    for weight in reference.parameters():
        weight.normal_(float(weight.dim() == 1), 0.25)
    reference.save_pretrained(tmp_path / "made")
    prompts = prompts_of(17, 9)
    expected = torch.cat([reference(torch.tensor([one])).logits for one in prompts])
    spec = load_spec(str(tmp_path / "made"), model_impl="transformers")
    assert not spec.head

    def work(mesh: Any) -> torch.Tensor:
        model = load_model(str(tmp_path / "made"), spec, F64, CPU, progress=False, mesh=mesh)
        rig = Paged(model)
        rows = [rig.sequence(prompt) for prompt in prompts]
        hidden = []
        monkeypatch.setattr(model, "logits", lambda x, rows=None: hidden.append(x) or model_logits(x, rows))
        model_logits = type(model).logits.__get__(model)
        rig.step([(row, len(row.ids)) for row in rows])
        last = torch.tensor([len(prompts[0]) - 1, sum(map(len, prompts)) - 1])
        return drive(model.classify(hidden[0][last]))

    for found in on_ranks(Layout(tensor=ranks), work):
        assert_close(found, expected)
