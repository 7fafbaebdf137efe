"""Resolution of configurations for small checkpoint folders."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.specs import model_spec
from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.cache_layout import block_bytes
from weft.config.families import load_spec
from weft.config.flags import from_keywords
from weft.config.group_settings import shared_settings
from weft.config.names import accepted_names, served_names
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import Config, ModelSection, SchedulerSection, SpeculationSection
from weft.config.sizing import cache_sizes, memory
from weft.config.spec import CacheSpec, ModelSpec, MoESpec, QuantizedSpec, RopeSpec

MIB, GIB = 1 << 20, 1 << 30

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 40},
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 2,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **MOE},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and with 8 GiB to give: the numbers below must not depend on the real one."""
    monkeypatch.setattr(devices, "gpu_memory", lambda: None)
    monkeypatch.setattr(devices, "available_memory", lambda: 8 * GIB)


def checkpoint(folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> str:
    """A folder with a config.json and a safetensors file without tensors."""
    config = {**BASE, "architectures": [architecture], **FAMILIES[architecture], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(folder)


def resolved(folder: str, **keywords: Any) -> EngineConfig:
    return resolve(from_keywords({"model": folder, "block_size": 16, **keywords}))


def refused(folder: str, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        resolved(folder, **keywords)
    return raised.value.message


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_resolves_and_the_result_survives_the_wire(tmp_path: Path, architecture: str) -> None:
    config = resolved(checkpoint(tmp_path, architecture))
    assert config.spec == load_spec(str(tmp_path), None)
    assert (config.device, config.dtype) == ("cpu", "bfloat16")
    assert (config.served_names, config.accepted_names) == ((tmp_path.name,), (str(tmp_path),))
    assert config.kv.max_model_len == 512
    assert config.scheduler.steps_in_flight == 1  # on a CPU
    assert config.kv.num_slots == 64
    assert [pool.cache for pool in config.kv.pools] == list(config.spec.caches)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_the_default_cache_is_no_larger_than_all_sequences_could_use(tmp_path: Path) -> None:
    (pool,) = resolved(checkpoint(tmp_path), max_num_seqs=3).kv.pools
    assert pool.num_blocks == 3 * 512 // 16


def test_the_default_cache_is_a_share_of_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path, max_position_embeddings=1 << 20)
    one_token = 4 * 2 * 2 * 16 * 2

    def cache_of(available: int) -> int:
        monkeypatch.setattr(devices, "available_memory", lambda: available)
        (pool,) = resolved(folder).kv.pools
        return (pool.num_blocks + 1) * 16 * one_token

    assert cache_of(64 * GIB) == 4 * GIB
    assert 1.49 * GIB < cache_of(3 * GIB) <= 1.5 * GIB


def test_the_default_cache_exceeds_its_cap_for_one_long_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 64 * GIB)
    folder = checkpoint(tmp_path, max_position_embeddings=12 << 20)
    (pool,) = resolved(folder).kv.pools
    assert pool.num_blocks == (12 << 20) // 16


def test_kv_cache_memory_is_taken_whole(tmp_path: Path) -> None:
    (pool,) = resolved(checkpoint(tmp_path), kv_cache_memory="64M").kv.pools
    assert pool.num_blocks == 64 * MIB // block_bytes(pool.cache, 16, "bfloat16") - 1


def test_a_context_that_the_cache_cannot_hold_is_refused_and_the_values_named_work(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    message = refused(folder, kv_cache_memory="100K")
    assert "--max-model-len 512" in message
    assert "set --kv-cache-memory to at least 264K, or --max-model-len to at most 176" in message
    assert resolved(folder, kv_cache_memory="264K").kv.pools[0].num_blocks == 32
    assert resolved(folder, kv_cache_memory="100K", max_model_len=176).kv.pools[0].num_blocks == 11
    assert "--max-model-len 177" in refused(folder, kv_cache_memory="100K", max_model_len=177)


def test_auto_takes_the_longest_context_that_fits(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert resolved(folder, kv_cache_memory="100K", max_model_len="auto").kv.max_model_len == 176
    assert resolved(folder, kv_cache_memory="1G", max_model_len="auto").kv.max_model_len == 512
    message = refused(folder, kv_cache_memory="9K", max_model_len="auto")
    assert "--kv-cache-memory 9K does not hold one block (--block-size 16)" in message
    assert resolved(folder, kv_cache_memory="16K", max_model_len="auto").kv.max_model_len == 16


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    message = refused(checkpoint(tmp_path), max_model_len=513)
    assert (
        message
        == "--max-model-len 513 is more than the model's 512 positions: set --max-model-len to at most 512"
    )


def test_more_cache_than_memory_is_refused(tmp_path: Path) -> None:
    message = refused(checkpoint(tmp_path), kv_cache_memory="9G")
    assert "--kv-cache-memory" in message
    assert "at most" in message


def test_two_kinds_hold_the_same_number_of_sequences(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "Qwen2ForCausalLM")
    scheduling = {"max_num_seqs": 4, "max_num_batched_tokens": 48}
    config = resolved(folder, kv_cache_memory="1M", **scheduling)
    full, window = config.kv.pools
    assert (full.cache.kind, window.cache.kind) == ("full", "window")
    need = [memory.blocks_for_one(pool.cache, 16, 512, config.scheduler) for pool in config.kv.pools]
    assert need == [32, 6]  # 512 positions; ceil((32 - 1 + 48) / 16) + 1
    assert full.num_blocks // need[0] == window.num_blocks // need[1] == 6
    used = sum((pool.num_blocks + 1) * block_bytes(pool.cache, 16, "bfloat16") for pool in config.kv.pools)
    assert MIB * 0.98 < used <= MIB
    # The default equals the use of four such sequences.
    assert [pool.num_blocks for pool in resolved(folder, **scheduling).kv.pools] == [128, 24]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_pools_hold_one_sequence_exactly_when_bytes_say_so(tmp_path: Path, architecture: str) -> None:
    spec = load_spec(checkpoint(tmp_path, architecture), None)
    scheduler = SchedulerSection(max_num_seqs=2, max_num_batched_tokens=40, long_prefill_token_threshold=24)
    for length in (1, 15, 16, 17, 100, 512):
        least = memory.bytes_for(spec, 16, "float32", 1, length, scheduler)
        pools = memory.pools_for(spec, 16, "float32", least, length, scheduler)
        for pool in pools:
            assert pool.num_blocks == memory.blocks_for_one(pool.cache, 16, length, scheduler)
        with pytest.raises(ConfigError, match="--kv-cache-memory"):
            memory.pools_for(spec, 16, "float32", least - 1, length, scheduler)


@pytest.mark.requirement("B2")
@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        (
            {"max_num_batched_tokens": 66, "max_num_seqs": 64},
            "set --max-num-batched-tokens to at least 79 or --max-num-seqs to at most 51",
        ),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 1}, "set --max-num-batched-tokens to at least 16"),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 9, "step_policy": "exclusive"},
            "set --max-num-batched-tokens to at least 9 or --max-num-seqs to at most 8",
        ),
    ],
)
def test_decode_must_leave_prefill_a_block(tmp_path: Path, keywords: dict[str, Any], told: str) -> None:
    message = refused(checkpoint(tmp_path), **keywords)
    assert "--max-num-batched-tokens" in message
    assert "--max-num-seqs" in message
    assert message.endswith(told)


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_num_batched_tokens": 79, "max_num_seqs": 64},
        {"max_num_batched_tokens": 66, "max_num_seqs": 51},
        {"max_num_batched_tokens": 16, "max_num_seqs": 1},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9, "step_policy": "exclusive"},
    ],
)
def test_the_smallest_budget_that_leaves_a_block_works(tmp_path: Path, keywords: dict[str, Any]) -> None:
    assert resolved(checkpoint(tmp_path), **keywords).scheduler.max_num_seqs == keywords["max_num_seqs"]


def test_dtype(tmp_path: Path) -> None:
    assert resolved(checkpoint(tmp_path, torch_dtype="float16")).dtype == "float16"
    assert resolved(str(tmp_path), dtype="float64").dtype == "float64"


@pytest.mark.requirement("F34")
def test_checkpoints_that_bring_code_are_refused_unless_trusted(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, auto_map={"AutoModelForCausalLM": "model.Model"})
    assert "--trust-remote-code" in refused(folder)
    assert resolved(folder, trust_remote_code=True).spec.family == "declared"
    checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["t.T", null]}}')
    message = refused(folder)
    assert "--trust-remote-code" in message
    assert "tokenizer_config.json" in message
    assert resolved(folder, trust_remote_code=True).spec.family == "declared"


def test_pickled_weights_are_refused_unless_asked_for(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert "--load-format pickle" in refused(folder, load_format="pickle")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "--load-format pickle" in refused(folder)
    assert "--load-format pickle" in refused(folder, load_format="safetensors")
    assert resolved(folder, load_format="pickle").model_path == folder


def test_a_folder_without_weights_is_refused_unless_they_are_made_up(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "--load-format dummy" in refused(folder)
    assert resolved(folder, load_format="dummy").model_path == folder


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "[" * 100_000])
def test_a_broken_tokenizer_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    message = refused(folder)
    assert "tokenizer_config.json" in message
    assert str(tmp_path) not in message


def test_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "tokenizer").mkdir()
    folder = checkpoint(tmp_path / "model")
    assert resolved(folder).tokenizer_path == folder
    tokenizer = checkpoint(tmp_path / "tokenizer")
    assert resolved(folder, tokenizer=tokenizer).tokenizer_path == tokenizer


def test_served_names(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    named = resolved(folder, served_model_name=["a", "b", "a"])
    assert (named.served_names, named.accepted_names) == (("a", "b"), ())
    assert "--served-model-name" in refused(folder, served_model_name=["a\n"])


def test_a_folder_is_shown_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The served name hides the path on the server; requests may also use the given name."""
    folder = tmp_path / "models" / "my-model"
    folder.mkdir(parents=True)
    checkpoint(folder)
    monkeypatch.chdir(folder.parent)
    for given in (str(folder), f"{folder}/", "my-model", "./my-model", "my-model/."):
        config = resolved(given)
        assert (config.served_names, config.accepted_names) == (("my-model",), (given,)), given
    monkeypatch.chdir(folder)
    assert resolved(".").served_names == ("my-model",)
    ours, theirs = (shared_settings(resolved(given)) for given in (".", str(folder)))
    assert ours == theirs, "each host's own affair"


def test_a_hub_name_is_shown_whole() -> None:
    model = ModelSection(model="Qwen/Qwen3-0.6B")
    cached = "/cache/models--Qwen--Qwen3-0.6B/snapshots/abc"
    assert served_names(model, cached) == ("Qwen/Qwen3-0.6B",)
    assert accepted_names(model, cached) == ()


def test_files_that_settings_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert "--chat-template" in refused(folder, chat_template=str(tmp_path / "no.jinja"))
    assert "--generation-config" in refused(folder, generation_config=str(tmp_path / "no"))
    assert resolved(folder, generation_config="vllm") == resolved(folder, generation_config="none")
    assert "--trace" in refused(folder, trace=str(tmp_path / "no" / "trace.json"))
    assert "--trace" in refused(folder, trace=str(tmp_path))
    assert resolved(folder, trace=str(tmp_path / "trace.json")).runner.trace is not None


def test_keys_must_fit_a_header_and_are_not_repeated(tmp_path: Path) -> None:
    message = refused(checkpoint(tmp_path), api_key=["sécret"])
    assert "--api-key" in message
    assert "cret" not in message


def test_fewer_layers(tmp_path: Path) -> None:
    assert resolved(checkpoint(tmp_path), num_hidden_layers_override=2).spec.layers == 2


def test_cuda_without_a_gpu_is_refused(tmp_path: Path) -> None:
    assert "--device cuda" in refused(checkpoint(tmp_path), device="cuda")


def test_a_gpu_is_taken_when_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_memory", lambda: 80 * GIB)
    folder = checkpoint(tmp_path)
    config = resolved(folder)
    assert config.device == "cuda"
    assert config.kv.pools[0].num_blocks == 64 * 512 // 16
    assert resolved(folder, device="cpu").device == "cpu"


def test_fp8_products_are_refused_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names what to change: the format, the dtype, or a package."""
    folder, asked = checkpoint(tmp_path), {"quantization": "w8a8-fp8"}
    assert "the device is cpu: use --quantization w8a8" in refused(folder, **asked)
    monkeypatch.setattr(devices, "gpu_memory", lambda: 80 * GIB)
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    assert resolved(folder, **asked).model.quantization == "w8a8-fp8"
    assert "use --dtype bfloat16" in refused(folder, dtype="float16", **asked)
    monkeypatch.setattr(devices, "gpu_capability", lambda: (8, 0))
    assert "this GPU has 8.0: use --quantization fp8" in refused(folder, **asked)
    resolved(folder, quantization="fp8")
    monkeypatch.setattr(devices, "gpu_capability", lambda: (8, 9))
    resolved(folder, **asked)
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    assert "pip install" in refused(folder, **asked)


def test_a_gpu_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_memory", lambda: 1 * MIB)
    message = refused(checkpoint(tmp_path))
    assert "--gpu-memory-utilization" in message
    assert "--max-num-batched-tokens" in message


def test_quantized_weights_are_counted_as_they_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU packed where there are kernels: not in float64, and no blocks of GGML."""
    counted: list[bool] = []

    def count(*args: Any, packed: bool) -> int:
        counted.append(packed)
        return 0

    monkeypatch.setattr(devices, "gpu_memory", lambda: 80 * GIB)
    monkeypatch.setattr(cache_sizes, "weight_bytes", count)
    config = resolved(checkpoint(tmp_path))
    cases = [("awq", True, "bfloat16"), ("awq", False, "bfloat16"), ("awq", True, "float64")]
    counted.clear()
    for method, there, dtype in [*cases, ("gguf", True, "bfloat16")]:
        monkeypatch.setattr(devices, "has_triton", lambda there=there: there)
        spec = msgspec.structs.replace(model_spec(), quantized=QuantizedSpec(method=method))
        for device in ("cuda", "cpu"):
            cache_sizes.cache_bytes(spec, dtype, device, config.model, config.cache, config.scheduler)
    assert counted == [True, True, False, True, False, True, False, True]


SEVENTY: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("more", [{}, {"kv_cache_memory": "1G"}, {"max_model_len": "auto"}])
def test_a_model_larger_than_memory_is_refused_with_what_it_needs(
    tmp_path: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path, **SEVENTY)
    message = refused(folder, load_format="dummy", **more)
    assert message.startswith("the model's weights need 132G of memory, and this machine has 8G available")
    for way in ("published quantized", "--tensor-parallel-size", "smaller model"):
        assert way in message
    assert "the model's weights need 40G" in refused(folder, load_format="dummy", quantization="int4", **more)
    # A CPU loads a matrix whole before rounding.
    message = refused(folder, quantization="int4", **more)
    assert message.startswith(
        "the model's weights need 132G of memory until --quantization has quantized them"
    )
    monkeypatch.setattr(devices, "available_memory", lambda: 200 * GIB)
    resolved(folder, load_format="dummy", **more)
    with monkeypatch.context() as patched:
        patched.setattr(devices, "gpu_memory", lambda: 80 * GIB)
        message = refused(folder, load_format="dummy", **more)
    assert message.startswith("the model's weights need 132G of memory, and a GPU has 80G available")
    assert "--quantization int4" in message


def test_ranks_of_one_machine_share_what_the_weights_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.config.resolve.usable_cores", lambda: 8)
    message = refused(checkpoint(tmp_path, **SEVENTY), load_format="dummy", tensor_parallel_size=2)
    assert "need 66G of memory, and this machine has 4G available for each of 2 ranks" in message


def test_the_bundled_model_is_float32_on_a_cpu() -> None:
    config = resolve(from_keywords({}))
    assert config.dtype == "float32"
    assert (config.served_names, config.accepted_names) == (("spool-text",), ())


def test_weight_bytes_of_a_known_model() -> None:
    spec = ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        rope=RopeSpec(dim=128),
        caches=(CacheSpec(kind="full", layers=tuple(range(32)), kv_heads=8, head_dim=128),),
        max_position=131072,
    )
    # Llama 3.1 8B has 8,030,261,248 parameters, of which 266,240 are norms.
    assert memory.weight_bytes(spec, "bfloat16") == 2 * (8_030_261_248 - 266_240)
    assert block_bytes(spec.caches[0], 1, "bfloat16") == 131072
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    embeddings = 2 * 2 * 128256 * 4096
    rounded = 3 * 128256 * 4096  # the head has 8 bits
    assert memory.weight_bytes(spec, "bfloat16", "int8") == layers + rounded
    assert memory.weight_bytes(spec, "bfloat16", "int4") == layers * 37 // 64 + rounded
    assert memory.weight_bytes(spec, "bfloat16", "fp8") == layers * 33 // 32 + rounded
    tied = msgspec.structs.replace(spec, tied=True)
    assert memory.weight_bytes(tied, "bfloat16") == 2 * layers + embeddings // 2
    assert memory.weight_bytes(tied, "bfloat16", "int8") == layers + embeddings // 4
    published = msgspec.structs.replace(spec, quantized=QuantizedSpec(method="awq", bits=5))
    assert memory.weight_bytes(published, "bfloat16") == 2 * layers + embeddings
    assert memory.weight_bytes(published, "bfloat16", packed=True) == layers * 5 // 8 + embeddings
    assert memory.weight_bytes(published, "bfloat16", "int8", packed=True) == layers + rounded


def test_weight_bytes_of_experts_in_another_format() -> None:
    spec = model_spec(moe=MoESpec(experts=8, top_k=2, intermediate=64, renormalize=True, layers=(0, 1)))
    plain = memory.weight_bytes(spec, "bfloat16", packed=True)
    one = msgspec.structs.replace(spec, quantized=QuantizedSpec(method="fp8", bits=8.5))
    both = msgspec.structs.replace(spec, quantized=QuantizedSpec(method="fp8", bits=8.5, expert_bits=4.25))
    experts = 2 * 3 * spec.hidden * 8 * 64
    saved = memory.weight_bytes(one, "bfloat16", packed=True) - memory.weight_bytes(
        both, "bfloat16", packed=True
    )
    assert saved == experts * 4.25 / 8
    assert plain > memory.weight_bytes(one, "bfloat16", packed=True)
    assert memory.weight_bytes(both, "bfloat16") == plain, "where it is dequantized"


def test_weight_bytes_without_a_head() -> None:
    spec = model_spec()
    headless = msgspec.structs.replace(spec, tied=False, head=False)
    assert memory.weight_bytes(headless, "bfloat16") == memory.weight_bytes(
        msgspec.structs.replace(spec, tied=True), "bfloat16"
    )


def test_weight_bytes_count_experts_and_what_quantizes_them() -> None:
    moe = MoESpec(experts=8, top_k=2, intermediate=10, renormalize=True, layers=(1, 2), shared=20)
    spec = model_spec(layers=3, hidden=32, intermediate=48, vocab_size=100, moe=moe)
    attention = 3 * 32 * 64 * (2 * 4 + 2 * 2)
    matrices = attention + 3 * 32 * 48 + 2 * 3 * 32 * (8 * 10 + 20)
    routers, embeddings = 2 * 8 * 32 * 4, 2 * 100 * 32
    assert memory.weight_bytes(spec, "bfloat16") == 2 * matrices + routers + 2 * embeddings
    assert memory.weight_bytes(spec, "bfloat16", "int8") == matrices + routers + 3 * embeddings // 2
    assert memory.weight_bytes(spec, "float64") == 8 * (matrices + embeddings) + 2 * routers


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1, "1"), (1024, "1K"), (9 * MIB, "9M"), (9 * MIB + 1, "9217K"), (10 * GIB + 1, "11G")],
)
def test_shown_sizes_are_never_smaller(count: int, text: str) -> None:
    from weft.config.flags import parse_size

    assert memory.show_bytes(count) == text
    assert (parse_size(text) or 0) >= count


def test_more_ranks_than_cores_are_told_of_and_far_more_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    folder = checkpoint(tmp_path)
    resolved(folder, tensor_parallel_size=2)
    assert not caplog.records
    resolved(folder, tensor_parallel_size=2, data_parallel_size=4)
    assert {record.getMessage() for record in caplog.records} == {
        "--tensor-parallel-size 2 x --data-parallel-size 4: 8 ranks, with at least one thread each, share 2 "
        "CPU cores"
    }
    message = refused(folder, tensor_parallel_size=2, data_parallel_size=5)
    assert "--tensor-parallel-size 2 x --data-parallel-size 5: 10 ranks" in message
    assert "2 CPU cores" in message
    assert "at most 8" in message


def test_ranks_have_their_share_of_caches_and_memory(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    alone, both = resolved(folder), resolved(folder, tensor_parallel_size=2)
    assert both.spec == alone.spec  # of the whole model
    heads = alone.kv.pools[0].cache.kv_heads
    assert both.kv.pools[0].cache.kv_heads == heads // 2
    assert resolved(folder, tensor_parallel_size=2 * heads).kv.pools[0].cache.kv_heads == 1
    # Half the bytes a rank hold as many positions.
    asked = {"max_model_len": 64, "max_num_seqs": 2}
    one = resolved(folder, kv_cache_memory="4M", **asked).kv.pools[0].num_blocks
    assert (
        resolved(folder, kv_cache_memory="2M", tensor_parallel_size=2, **asked).kv.pools[0].num_blocks == one
    )


def test_a_size_that_ranks_do_not_divide_is_refused(tmp_path: Path) -> None:
    message = refused(checkpoint(tmp_path), tensor_parallel_size=3)
    assert "--tensor-parallel-size 3 does not divide the model's" in message
    assert "attention heads" in message


def test_ranks_of_a_host_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 64 * MIB)
    folder = checkpoint(tmp_path)
    resolved(folder, kv_cache_memory="32M", tensor_parallel_size=2)
    message = refused(folder, kv_cache_memory="33M", tensor_parallel_size=2)
    assert "--kv-cache-memory 33M is more than the 32M that the device has for each of 2 ranks" in message
    several = {"tensor_parallel_size": 2, "hosts": 2, "group_secret": "secret"}
    hosts = from_keywords({"model": folder, "kv_cache_memory": "33M", **several})
    assert resolve(hosts, group="g", host=HostShare(ranks=1, index=1)).ranks_beside == 1


def test_a_group_over_several_hosts_needs_its_own_command(tmp_path: Path) -> None:
    message = refused(checkpoint(tmp_path), tensor_parallel_size=2, hosts=2, group_secret="secret")
    assert message.startswith("--hosts 2: run `weft engine FILE --group NAME` on each host of the group")


def test_an_error_of_the_draft_model_names_the_draft_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodysForCausalLM"]}')
    for name in (str(tmp_path), str(tmp_path / "missing")):
        speculation = SpeculationSection(speculative_method="draft", speculative_model=name)
        with pytest.raises(ConfigError, match=f"--speculative-model {name}: ") as caught:
            resolve(Config(model=ModelSection(model="spool-text"), speculation=speculation))
        assert caught.value.param == "--speculative-model"
