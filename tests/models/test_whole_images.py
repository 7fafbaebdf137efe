"""Models with towers of transformers against transformers: towers, logits, chunks, ranks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.compared import distance
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from tests.support.vision_models import Prompt, make_prompt, random_image
from tests.support.whole_image_models import CASES, PLACEHOLDER, SQUARE, inputs_of, types_name
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.sizing.memory import weight_bytes
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.models.tower import load_tower
from weft.types.layout import Layout

Tensor = torch.Tensor
CPU = torch.device("cpu")
NAMES = list(CASES)


def shapes(name: str, *parts: int | tuple[int, int]) -> list[int | tuple[int, int]]:
    """Return parts of a prompt. Images of Gemma 3, and tiles, all have 3 x 3 tokens."""
    return [(3, 3) if name in SQUARE and isinstance(part, tuple) else part for part in parts]


def several(name: str, spec: Any, seed: int) -> Prompt:
    return make_prompt(shapes(name, 4, (2, 3), (1, 2), 3, (4, 1), 6), spec, seed)


@torch.no_grad()
def expected(reference: Any, name: str, prompt: Prompt, ids: list[int], spec: Any, dtype: Any) -> Tensor:
    """Return the reference's logits of all positions, computed in one piece."""
    inputs = prompt.inputs(spec, dtype)
    if kind := types_name(CASES[name][0]):
        inputs[kind] = torch.tensor([[int(token == PLACEHOLDER) for token in ids]])
    result: Tensor = reference(torch.tensor([ids]), use_cache=False, **inputs).logits[0]
    return result


@mostly_slow("name", NAMES, ["gemma3", "gemma4"])
def test_towers_float64(name: str, seeing: Any) -> None:
    checkpoint = seeing(name)
    model = checkpoint.load(torch.float64)
    reference = checkpoint.reference_in_float64()
    for size in [(24, 24)] if name in SQUARE else [(24, 24), (8, 56), (32, 8)]:
        image = random_image(*size, seed=5)
        with torch.inference_mode():
            found = model.vision.embed(image).main
        given = inputs_of([image], model.spec, torch.float64)
        with torch.no_grad():
            if name == "llama4":
                made = reference.get_image_features(**given, return_dict=True).last_hidden_state
                made = reference.multi_modal_projector(made)
            else:
                made = reference.model.get_image_features(**given, return_dict=True).pooler_output
        theirs = made[0] if not isinstance(made, Tensor) or made.dim() == 3 else made
        if model.spec.vision.media.row_end is not None:
            columns = size[1] // 8
            gaps = found.view(-1, columns + 1, found.shape[1])
            assert not gaps[:, -1].any()
            found = gaps[:, :-1].flatten(0, 1)
        assert found.shape == theirs.shape
        # Norms, pooling and frequencies are float32 in the reference for every dtype.
        assert (found - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@mostly_slow("name", NAMES, ["mistral3"])
def test_whole_prompts_float32(name: str, seeing: Any, paged: Any) -> None:
    checkpoint = seeing(name)
    model = checkpoint.load()
    prompts = [several(name, model.spec, 0), make_prompt(shapes(name, (2, 2), 1), model.spec, 1)]
    for prompt in [*prompts, make_prompt((9,), model.spec, 2)]:
        harness = paged(model)
        sequence = harness.reading(prompt)
        harness.step([(sequence, len(prompt.ids))])
        theirs = expected(checkpoint.reference, name, prompt, prompt.ids, model.spec, torch.float32)
        assert distance(sequence.logits, theirs) <= 1e-4


def _mixed(harness: Any, sequences: list[Any], prompts: list[Prompt], seed: int, *, cuts: bool) -> None:
    """Compute prompts in random chunks, beside decode steps. ``cuts``: chunks may cut images."""
    rng = random.Random(seed)
    while any(s.computed < len(s.ids) for s in sequences):
        prefill, decode = [], []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            left = len(prompt.ids) - sequence.computed
            if left > 0:
                end = sequence.computed + rng.randint(1, min(left, 5))
                for item in () if cuts else prompt.items:
                    if item.start < end < item.start + item.count:
                        end = item.start + item.count
                prefill.append((sequence, end - sequence.computed))
            elif sequence.computed < len(sequence.ids) and rng.random() < 0.8:
                decode.append((sequence, 1))
        if prefill or decode:
            harness.step(prefill, decode)


@mostly_slow("name", NAMES, ["gemma3", "mistral3"])
def test_chunks_beside_text_float32(name: str, seeing: Any, paged: Any) -> None:
    checkpoint = seeing(name)
    model = checkpoint.load()
    harness = paged(model)
    prompts = [
        several(name, model.spec, 20),
        make_prompt((17,), model.spec, 21),
        make_prompt(shapes(name, (5, 3), 2), model.spec, 22),
    ]
    sequences = []
    for prompt, more in zip(prompts, [[5, 6, 7, 8], [9, 10, 11], [12] * 6], strict=True):
        sequence = harness.reading(prompt)
        sequence.ids = prompt.ids + more
        sequences.append(sequence)
    _mixed(harness, sequences, prompts, 2, cuts=model.spec.vision.ahead == "none")
    for sequence, prompt in zip(sequences, prompts, strict=True):
        theirs = expected(checkpoint.reference, name, prompt, sequence.ids, model.spec, torch.float32)
        assert distance(sequence.logits, theirs) <= 1e-4


@mostly_slow("name", NAMES, ["gemma3"])
def test_images_matter(name: str, seeing: Any, paged: Any) -> None:
    """Other last rows of an image change the output at its first token only with attention ahead."""
    model = seeing(name).load()
    prompt = make_prompt(shapes(name, 3, (3, 3), 4), model.spec, 1)
    other = make_prompt(shapes(name, 3, (3, 3), 4), model.spec, 1)
    other.images[0][:, -4:] = 255 - other.images[0][:, -4:]
    first = prompt.embedded(model.vision)[0].main[:1]
    made = []
    for one in (prompt, other):
        harness = paged(model)
        sequence = harness.reading(one)
        # The towers mix all patches, so the embedding of the first token is set to that of the first image.
        with torch.inference_mode():
            sequence.seen.embedded[0].main[:1] = first
        harness.step([(sequence, len(one.ids))])
        made.append(torch.stack(sequence.logits))
    assert torch.equal(made[0][:4], made[1][:4]), "text before the image does not see it"
    assert (made[0][-1] - made[1][-1]).abs().max() > 0.01 * made[0].abs().max()
    assert torch.equal(made[0][4], made[1][4]) == (model.spec.vision.ahead == "none")


@mostly_slow("name", NAMES, ["gemma4-inputs"])
def test_greedy_tokens_float64(name: str, seeing: Any, paged: Any) -> None:
    checkpoint = seeing(name)
    reference = checkpoint.reference_in_float64()
    model = checkpoint.load(torch.float64)
    prompt = make_prompt(shapes(name, 4, (3, 4), 3, (2, 5), 4), model.spec, 31)
    harness = paged(model)
    sequence = harness.reading(prompt)
    end = prompt.items[0].start + prompt.items[0].count
    harness.step([(sequence, end)])
    harness.step([(sequence, len(prompt.ids) - end)])
    ids = list(prompt.ids)
    for _ in range(6):
        logits = sequence.logits[-1].clone()
        logits[PLACEHOLDER] = -torch.inf
        top = logits.topk(2).values
        assert top[0] - top[1] > 1e-4, "a tie: choose another seed"
        sequence.ids.append(int(logits.argmax()))
        theirs = expected(reference, name, prompt, ids, model.spec, torch.float64)[-1]
        theirs[PLACEHOLDER] = -torch.inf
        ids.append(int(theirs.argmax()))
        assert sequence.ids == ids
        harness.step([], [(sequence, 1)])


@mostly_slow("name", ["gemma3", "gemma4-inputs", "mistral3"], ["gemma3"])
def test_two_ranks(name: str, seeing: Any, paged: Any) -> None:
    checkpoint = seeing(name)
    prompt = several(name, load_spec(checkpoint.folder), 70)
    end = prompt.items[0].start + prompt.items[0].count

    def run(model: Model) -> Tensor:
        harness = paged(model)
        sequence = harness.reading(prompt)
        harness.step([(sequence, end)])
        harness.step([(sequence, len(prompt.ids) - end)])
        return torch.stack(sequence.logits)

    whole = run(checkpoint.load(torch.float64))
    for logits in on_ranks(Layout(tensor=2), lambda mesh: run(checkpoint.load(torch.float64, mesh=mesh))):
        assert (logits - whole).abs().max() <= 1e-9 * whole.abs().max()


@mostly_slow("name", NAMES, ["gemma3"])
def test_size_of_the_weights(name: str, seeing: Any) -> None:
    model = seeing(name).read()
    real = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(model.spec, "float32") == pytest.approx(real, rel=0.04)


def _renamed(source: str, target: Path, change: Any) -> str:
    """Write a copy of a checkpoint with changed names of tensors; a name without a result is left out."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = {new: tensor for name, tensor in load_file(path).items() if (new := change(name))}
    save_file(tensors, path, metadata={"format": "pt"})
    return str(target)


@mostly_slow("name", ["gemma3", "gemma4", "mistral3", "internvl"], ["gemma3"])
def test_published_names(name: str, seeing: Any, paged: Any, tmp_path: Path) -> None:
    """Publishers and transformers write the names in two forms. The tower loads alone, too."""
    checkpoint = seeing(name)

    def other(one: str) -> str:
        if name == "gemma4":
            return one.removeprefix("model.")
        if one.startswith("language_model."):
            return one.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            )
        inner = "vision_tower.vision_model." if name == "gemma3" else "vision_tower."
        return f"model.{one.replace('vision_tower.', inner)}"

    folder = _renamed(checkpoint.folder, tmp_path / "other", other)
    spec = load_spec(folder)
    model = load_model(folder, spec, torch.float64, CPU, progress=False)
    prompt = make_prompt(shapes(name, 3, (2, 3), 4), spec, 1)
    made = []
    for one in (checkpoint.load(torch.float64), model):
        harness = paged(one)
        sequence = harness.reading(prompt)
        harness.step([(sequence, len(prompt.ids))])
        made.append(torch.stack(sequence.logits))
    assert torch.equal(made[0], made[1])
    alone = load_tower(folder, spec, torch.float64, CPU, progress=False).vision
    assert torch.equal(prompt.embedded(alone)[0].main, prompt.embedded(model.vision)[0].main)
    text = load_spec(folder, language_model_only=True)
    assert load_model(folder, text, torch.float32, CPU, progress=False).vision is None


def test_a_missing_tensor_is_named(seeing: Any, tmp_path: Path) -> None:
    cut = "multi_modal_projector.mm_soft_emb_norm.weight"
    folder = _renamed(seeing("gemma3").folder, tmp_path / "cut", lambda one: "" if one == cut else one)
    with pytest.raises(ConfigError, match=r"missing: multi_modal_projector\.mm_soft_emb_norm\.weight"):
        load_model(folder, load_spec(folder), torch.float32, CPU, progress=False)
