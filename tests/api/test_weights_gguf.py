"""New weights of a model from a GGUF file: the same logprobs as a fresh start of a GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.test_packed_gguf import made
from tests.support.gguf_files import write_model
from tests.support.new_weights import Tensors
from tests.support.slow import mostly_slow
from weft import LLM, SamplingParams
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.hub import resolve_model_path
from weft.gguf.checkpoint_folder import gguf_files
from weft.gguf.container import Container
from weft.models.files import WeightFile
from weft.models.quantized.ggml_rounding import rounded

PROMPTS = [{"prompt_token_ids": [5, 9, 33, 2, 71, 18, 40]}, {"prompt_token_ids": [7] * 5}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "kv_cache_memory": "16M",
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "device": "cpu",
}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "attn_output": "F16"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def outputs(llm: LLM) -> list[Any]:
    """Return ids and logprobs of each prompt."""
    found = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [(list(one.token_ids), [str(each) for each in one.logprobs]) for one in found]


def pack(kind: str, values: np.ndarray) -> np.ndarray:
    """Return ``values`` in blocks of ``kind``, as Weft rounds."""
    return rounded(kind, torch.from_numpy(np.ascontiguousarray(values))).numpy()


def moved(model: Any, seed: int) -> Any:
    """Add noise to all weights of ``model``, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one += torch.randn(one.shape, generator=generator) * 0.03
    return model


def published(path: Path) -> Tensors:
    """Return the weights of a GGUF file by published name."""
    found: Tensors = {}
    for file in gguf_files(Path(resolve_model_path(str(path)))):
        with WeightFile(file) as opened:
            found |= {name: opened.tensor(name).clone() for name in opened.names()}
    return found


class Files:
    """GGUF files of a model: ``old`` and ``new`` in ``kind``, and the numbers of ``new`` in float32."""

    def __init__(self, folder: Path, name: str, kind: str, kinds: dict[str, str] | None = None) -> None:
        self.folder, self.old, self.new = folder, folder / "old.gguf", folder / "new.gguf"
        model = made(name)
        write_model(self.old, model, kind=kind, kinds=kinds, pack=pack)
        moved(model, 1)
        write_model(self.new, model, kind=kind, kinds=kinds, pack=pack)
        write_model(folder / "plain.gguf", model)
        self.numbers = published(folder / "plain.gguf")


CASES = [
    ("llama", "Q8_0", {}),
    ("qwen3 moe", "Q4_K", {"tensor_parallel_size": 2, "dtype": "float32"}),
    ("qwen3 tied", "Q4_K", {"dtype": "float64"}),
    ("llama", "IQ4_XS", {"tensor_parallel_size": 2}),
    *(("llama", kind, {"dtype": "float32"}) for kind in ("Q4_0", "Q6_K", "Q5_K", "Q3_K", "IQ4_NL", "Q2_K")),
    ("gpt-oss", "Q8_0", {}),
    ("llama", "mixed", {}),
]


@mostly_slow(("name", "kind", "form"), CASES, [CASES[-1]])
def test_an_update_equals_a_fresh_start(name: str, kind: str, form: dict[str, Any], tmp_path: Path) -> None:
    """From numbers, which are rounded to the types of the file, from a file, and back to the first file."""
    files = Files(tmp_path, name, "Q4_K" if kind == "mixed" else kind, MIXED if kind == "mixed" else None)
    settings = SETTINGS | {"dtype": "bfloat16"} | form
    with LLM(str(files.new), **settings) as llm:
        due = outputs(llm)
    with LLM(str(files.old), **settings) as llm:
        before = outputs(llm)
        assert before != due
        llm.update_weights(files.numbers.items(), version="numbers")
        if kind != "mixed":  # matrices of plain types keep the exact numbers
            assert outputs(llm) == due
        llm.update_weights(files.new)
        assert outputs(llm) == due
        layer = {name: one for name, one in files.numbers.items() if ".layers.1.self_attn." in name}
        llm.update_weights(layer.items(), partial=True)
        llm.update_weights(files.old)
        assert outputs(llm) == before


def test_unsuitable_weights_change_nothing(tmp_path: Path) -> None:
    """Also after a sleep of level 2, which reads the file of the start again."""
    files = Files(tmp_path, "llama", "Q8_0")
    model = made("llama")
    write_model(tmp_path / "other.gguf", model, kind="Q8_0", kinds={"attn_v": "Q4_0"})
    write_model(tmp_path / "turned.gguf", model, kind="Q8_0", **{"rope.freq_base": 500.0})
    damaged = tmp_path / "nan.gguf"
    shutil.copy(files.new, damaged)
    down = next(one for one in Container(damaged).tensors() if one.name == "blk.0.ffn_down.weight")
    with damaged.open("r+b") as opened:
        opened.seek(down.offset)
        opened.write(np.float16("nan").tobytes())
    (tmp_path / "cut.gguf").write_bytes(files.new.read_bytes()[:-500])
    (tmp_path / "safe").mkdir()
    save_file(files.numbers, tmp_path / "safe" / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    nan = files.numbers[query].clone()
    nan[3, 3] = float("nan")
    refused: list[tuple[Any, str]] = [
        (tmp_path / "other.gguf", "v_proj.weight as Q4_0, and the model in use has Q8_0"),
        (tmp_path / "turned.gguf", "another rope_theta"),
        (damaged, r"a scale of blk\.0\.ffn_down\.weight is not finite"),
        (tmp_path / "cut.gguf", "cut.gguf is damaged"),
        (tmp_path / "none.gguf", "no file"),
        (tmp_path, "several GGUF files"),
        ({**files.numbers, query: nan}.items(), f"{query} is not finite"),
        ({**files.numbers, query: nan[:9]}.items(), f"{query} has shape"),
    ]
    with LLM(str(files.old), **SETTINGS, dtype="bfloat16") as llm:
        before = outputs(llm)
        for source, why in refused:
            with pytest.raises((InvalidRequest, ConfigError), match=why):
                llm.update_weights(source)
        assert outputs(llm) == before
        llm.sleep(level=2)
        llm.wake_up()
        assert outputs(llm) == before
        llm.update_weights(tmp_path / "safe")
        after = outputs(llm)
        llm.sleep(level=2)
        llm.wake_up()
        assert outputs(llm) == after != before
        # A trainer of a model with towers names the same matrices below another prefix.
        llm.update_weights(files.old)
        numbers = files.numbers.items()
        llm.update_weights((name.replace("model.", "model.language_model."), one) for name, one in numbers)
        assert outputs(llm) == after


@pytest.mark.slow
def test_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """The file has a type for each expert."""
    files = Files(tmp_path, "qwen3 moe", "Q4_K")
    numbers = dict(files.numbers)
    for layer in {name.partition(".experts.")[0] for name in numbers if ".experts." in name}:
        parts = {
            role: torch.stack([numbers.pop(f"{layer}.experts.{n}.{role}_proj.weight") for n in range(4)])
            for role in ("gate", "up", "down")
        }
        numbers[f"{layer}.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        numbers[f"{layer}.experts.down_proj"] = parts["down"]
    with LLM(str(files.old), **SETTINGS, dtype="float32") as llm:
        before = outputs(llm)
        with pytest.raises(InvalidRequest, match=r"gate_up_proj can't be rounded .* send .*gate_proj"):
            llm.update_weights(numbers.items())
        assert outputs(llm) == before
