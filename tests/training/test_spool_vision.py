"""A vision model: the fast form equals the reference, and rows equal those of template and processor."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from training.loop import Run
from training.ocr import Rows, forced, pictures, prompt_text, read_lines
from training.qwen3_5 import Qwen3_5MoeWithMtp, grid_of, patches
from training.spool_vision import IMAGE_TOKENS, MERGE, PATCH, PROCESSOR, SpoolVision, VisionRecipe
from training.tokenizer import IMAGE, VISION_TEMPLATE
from weft.config.hub import bundled_models
from weft.eval.ocr_mini import Line, lines, messages
from weft.text.template import ChatTemplate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return SpoolVision().tokenizer(Path("unused"))


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5MoeWithMtp:
    torch.manual_seed(0)
    return SpoolVision().new_model(tokenizer).eval()


@pytest.fixture(scope="module")
def asked() -> list[Line]:
    return list(itertools.islice(lines("train", 3, (1, 8)), 6))


@torch.no_grad()
def test_the_fast_way_is_the_references(
    model: Qwen3_5MoeWithMtp, tokenizer: PreTrainedTokenizerFast, asked: list[Line]
) -> None:
    rows = Rows(tokenizer, IMAGE_TOKENS)
    ids, _, images = rows.encode(asked)
    hidden, positions, _ = model.read(ids, images)
    wanted = model.model(
        input_ids=ids,
        pixel_values=patches(images, PATCH, MERGE).flatten(0, 1),
        image_grid_thw=torch.tensor([grid_of(images, PATCH)] * len(ids)),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
    )
    torch.testing.assert_close(hidden, wanted.last_hidden_state, atol=1e-5, rtol=1e-4)
    assert positions.shape == (3, *ids.shape)
    assert positions[:, :, -1].max() < ids.shape[1] - IMAGE_TOKENS + 16, "an image takes its longer side"


def test_patches_are_what_the_processor_makes(asked: list[Line]) -> None:
    settings = {k: v for k, v in PROCESSOR.items() if k not in ("image_processor_type", "processor_class")}
    processor = Qwen2VLImageProcessorPil(**settings)
    images = pictures(asked)
    colours = [image[None].expand(3, -1, -1) for image in images]
    made = processor(images=colours, return_tensors="pt", input_data_format="channels_first")
    assert made["image_grid_thw"].tolist() == [list(grid_of(images, PATCH))] * len(asked)
    torch.testing.assert_close(
        made["pixel_values"], patches(images, PATCH, MERGE).flatten(0, 1), atol=1e-5, rtol=0
    )


def test_prompts_are_what_the_template_writes(asked: list[Line]) -> None:
    for line in asked:
        written = ChatTemplate(VISION_TEMPLATE).render(
            {"messages": messages(line), "add_generation_prompt": True}
        )
        assert written.replace(IMAGE, IMAGE * IMAGE_TOKENS) == prompt_text(line, IMAGE_TOKENS)


def test_only_the_answer_counts(tokenizer: PreTrainedTokenizerFast, asked: list[Line]) -> None:
    ids, weights, images = Rows(tokenizer, IMAGE_TOKENS).encode(asked)
    assert len(images) == len(asked)
    for row, weight, line in zip(ids, weights, asked, strict=True):
        counted = row[weight > 0].tolist()
        assert len(counted) == len(line.text) + 1, "every character is a token of its own"
        assert tokenizer.decode(counted) == line.text + "<|im_end|>"
        assert int((row == tokenizer.convert_tokens_to_ids(IMAGE)).sum()) == IMAGE_TOKENS


@torch.no_grad()
def test_drafts_see_nothing_ahead(
    model: Qwen3_5MoeWithMtp, tokenizer: PreTrainedTokenizerFast, asked: list[Line]
) -> None:
    ids, _, images = Rows(tokenizer, IMAGE_TOKENS).encode(asked)
    hidden, positions, _ = model.read(ids, images)
    whole = model.lookahead(ids, hidden, positions)
    assert whole.shape == (len(ids), ids.shape[1] - 1, hidden.shape[-1])
    part = model.lookahead(ids[:, :-3], hidden[:, :-3], positions[:, :, :-3])
    torch.testing.assert_close(part, whole[:, :-3], atol=1e-5, rtol=1e-4)


def test_a_run_learns_resumes_and_exports(tmp_path: Path, asked: list[Line]) -> None:
    """The watched answers equal those of ``generate`` of the exported checkpoint, which the reference
    loads."""
    script, recipe = SpoolVision(), VisionRecipe(steps=3, warmup=1, draft_from=0.0, bf16=False)
    run = Run(tmp_path, script, recipe)
    rows = Rows(run.tokenizer, IMAGE_TOKENS)
    batch = rows.encode(asked[:2])
    first = run.update(*batch)
    assert set(first) == {"answer_loss", "draft_loss"}
    run.save()
    resumed = Run(tmp_path, script, recipe)
    assert resumed.step == 1
    for each in (run, resumed):
        last = each.update(*batch)
    assert last["answer_loss"] < first["answer_loss"]
    assert all(
        torch.equal(a, b) for a, b in zip(run.model.parameters(), resumed.model.parameters(), strict=True)
    )

    folder = tmp_path / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    loaded = Qwen3_5MoeWithMtp.from_pretrained(folder, dtype=torch.float32).eval()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    for name, p in loaded.named_parameters():
        torch.testing.assert_close(p, saved[name].bfloat16().float(), msg=name)
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert type(reference).__name__ == "Qwen3_5MoeForConditionalGeneration"
    exact, _ = forced(loaded, rows, asked)
    answers = read_lines(loaded, rows, asked)
    assert [answer == line.text for answer, line in zip(answers, asked, strict=True)] == exact


def test_the_bundled_checkpoint() -> None:
    """The files match the recipe; ``tests/eval/test_reading.py`` tests the answers."""
    folder = Path(bundled_models()["spool-vision"])
    result = json.loads((ROOT / "training/results/spool-vision/result.json").read_text())
    assert result["exact"] >= 0.95 * result["lines"] == 475
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "Qwen3_5MoeForConditionalGeneration"
    ]
    assert json.loads((folder / "preprocessor_config.json").read_text()) == PROCESSOR
    assert (folder / "chat_template.jinja").read_text() == VISION_TEMPLATE
    fresh = SpoolVision().new_model(PreTrainedTokenizerFast.from_pretrained(folder))
    tensors = load_file(folder / "model.safetensors")
    assert {name: t.shape for name, t in tensors.items() if name.startswith("mtp.")}.keys()
    assert 3.0e6 < sum(t.numel() for t in tensors.values()) < 3.3e6
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in fresh.parameters())
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
