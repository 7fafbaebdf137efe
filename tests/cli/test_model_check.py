"""``weft models --check``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.config.test_generic import SPEC as PERSIMMON
from weft.cli.model_check import check_model
from weft.cli.models import models
from weft.common.errors import ConfigError
from weft.config.cache_layout import block_bytes
from weft.config.families.generic import probing
from weft.config.flags import from_keywords
from weft.config.hub import BUNDLED
from weft.config.resolve import resolve
from weft.config.sections.all import Config


def asked(model: str, **given: Any) -> Config:
    """Return the configuration of ``weft serve MODEL`` with the flags ``given``."""
    return from_keywords({"model": model, **given})


def test_the_facts_of_a_bundled_model() -> None:
    report = check_model(asked("spool-vision"))
    assert (report.served, report.refused) == (True, [])
    assert report.implementation == "weft (qwen3_5)"
    assert report.context == 2048
    memory = report.memory
    assert memory is not None
    assert memory.weights > memory.embeddings + memory.tower > memory.tower > 0
    assert memory.kv_per_1000_tokens > 0 < memory.state_per_sequence
    assert {"generate", "images", "embed (last)"} <= set(report.tasks)
    assert report.images is not None
    assert report.images.startswith("at most ")
    assert report.images.endswith("<|image_pad|> in the chat template")
    small = check_model(asked("spool-vision", quantization="int4")).memory
    assert small is not None
    assert small.weights < memory.weights


def test_weights_and_kv_of_1000_tokens() -> None:
    size = sum(path.stat().st_size for path in (BUNDLED / "spool-text").glob("*.safetensors"))
    weights = check_model(asked("spool-text", dtype="bfloat16")).memory
    assert weights is not None
    assert 0.97 * size < weights.weights < 1.03 * size
    config = json.loads((BUNDLED / "spool-text" / "config.json").read_text())
    memory = check_model(asked("spool-text", dtype="float32")).memory
    assert memory is not None
    each = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert memory.kv_per_1000_tokens == 1000 * each


def test_json_and_the_exit_status(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(BUNDLED / "spool-text", folder)
    good = CliRunner().invoke(models, ["--check", str(folder), "--json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)["served"] is True
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{")
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    bad = CliRunner().invoke(models, ["--check", str(folder), "--json"])
    assert bad.exit_code == 3
    refused = json.loads(bad.stdout)["refused"]
    for said in ("OtherForCausalLM", "tokenizer.json", weights.name):
        assert any(said in one for one in refused), said
    text = CliRunner().invoke(models, ["--check", str(folder)])
    assert text.exit_code == 3
    assert "does not serve" in text.stdout


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no folder"):
        check_model(asked("./nothing"))
    assert CliRunner().invoke(models, ["--json"]).exit_code == 2


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_model_len": 300, "kv_cache_dtype": "fp8", "quantization": "w8a8"},
        {"max_model_len": 1 << 20},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 5},
        {"hf_overrides": '{"is_original_qwen3_reranker": 1}'},
        {"hf_overrides": '{"hidden_size": 8}'},
        pytest.param({"model_impl": "transformers", "tensor_parallel_size": 3}, marks=pytest.mark.slow),
        {"tokenizer": "./nothing"},
        {"dtype": "float64", "kv_cache_memory": "1K"},
    ],
    ids=str,
)
def test_the_answer_is_the_answer_of_serve(given: dict[str, Any]) -> None:
    config = asked("spool-text", **given)
    report = check_model(config)
    said, resolved = None, None
    try:
        resolved = resolve(config)
    except ConfigError as error:
        said = error.message
    if resolved is None:
        assert said in report.refused
        assert not report.served
        return
    assert (report.served, report.refused) == (True, [])
    assert (report.dtype, report.context) == (resolved.dtype, resolved.kv.max_model_len)
    pool, memory = resolved.kv.pools[0], report.memory
    assert memory is not None
    block = block_bytes(pool.cache, pool.block_size, resolved.dtype)
    assert memory.kv_per_1000_tokens == 1000 * block // pool.block_size


def test_flags_of_the_command_line() -> None:
    flags = ["--max-model-len", "64", "-tp", "2", "--dtype", "half", "--json"]
    made = CliRunner().invoke(models, ["--check", "spool-text", *flags])
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    assert (facts["context"], facts["dtype"]) == (64, "float16")
    assert CliRunner().invoke(models, ["--max-model-len", "64"]).exit_code == 2
    refused = CliRunner().invoke(models, ["--check", "spool-text", "--max-model-len", "1000000"])
    assert refused.exit_code == 3
    assert "--max-model-len" in refused.stdout


def test_the_command_reads_no_weights_with_torch() -> None:
    code = "import sys; import weft.cli.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_code_of_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["PersimmonForCausalLM"]}')
    monkeypatch.setattr(probing, "probed_spec", lambda *_: PERSIMMON)
    report = check_model(asked(str(tmp_path)))
    assert report.implementation == "transformers"
