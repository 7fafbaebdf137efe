"""Trains ``spool-vision``: a small Qwen3.5-MoE with a vision tower that reads drawn lines (ocr-mini).

Uses the ``transformers`` model class from a random start, with its MTP module beside it. Run from the
repository root::

    python -m training.spool_vision train --out runs/spool-vision
    python -m training.spool_vision evaluate --checkpoint runs/spool-vision/checkpoint
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from training.chat import stop_ids, tidy, write_result
from training.loop import DEV_SEED, Batch, Recipe, Script, add_evaluate_parser, add_train_parser
from training.muon import muon_and_adamw
from training.ocr import Rows, forced, ocr_batches, read_lines
from training.qwen3_5 import Qwen3_5MoeWithMtp
from training.tokenizer import IMAGE, IMAGE_END, IMAGE_START, VIDEO, VISION_TEMPLATE, VISION_TOKENS
from weft.eval.ocr_mini import HEIGHT, WIDTH, is_right, lines, ocr_test_set

TOKENIZER = Path(__file__).parents[1] / "weft/checkpoints/spool-text"
PATCH, MERGE = 8, 2  # pixels of a patch's side; patches of a token's side
IMAGE_TOKENS = (WIDTH // PATCH // MERGE) * (HEIGHT // PATCH // MERGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionRecipe(Recipe):
    """``least`` and ``most`` bound the lines' lengths. ``draft_weight`` weighs the loss of the MTP module,
    which learns once the share ``draft_from`` of the run is over.
    """

    batch_tokens: int = 2304
    lr: float = 2e-3
    matrix_lr: float = 4e-3
    router_aux: float = 0.01
    draft_weight: float = 0.2
    draft_from: float = 0.5
    least: int = 1
    most: int = 8


def new_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5MoeConfig:
    """3 delta nets and 1 full attention, 8 experts of which 2 are active and a shared one, a tower of 4."""
    stops = stop_ids(tokenizer)
    start, end, image, video = tokenizer.convert_tokens_to_ids([IMAGE_START, IMAGE_END, IMAGE, VIDEO])
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": stops[0],
        "pad_token_id": stops[1],
        "bos_token_id": None,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 256,
    }
    return Qwen3_5MoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )


class SpoolVision(Script[VisionRecipe]):
    """Supply the model, its losses and the watched figures."""

    recipe = VisionRecipe

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerFast:
        """Return the tokenizer of ``spool-text`` extended by image tokens."""
        known = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
        known.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
        known.chat_template = VISION_TEMPLATE
        return known

    def new_model(self, tokenizer: PreTrainedTokenizerFast) -> Qwen3_5MoeWithMtp:
        """A random model in float32."""
        model = Qwen3_5MoeWithMtp._from_config(
            new_config(tokenizer),
            experts_implementation="grouped_mm",
            attn_implementation="eager",
            dtype=torch.float32,
        )
        stops = stop_ids(tokenizer)
        model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1])
        return model

    def optimizers(self, model: PreTrainedModel, recipe: VisionRecipe) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the layers, AdamW for the rest."""
        return muon_and_adamw(model, recipe.matrix_lr, recipe.lr, recipe.weight_decay)

    def batches(
        self, tokenizer: PreTrainedTokenizerFast, recipe: VisionRecipe, first_pool: int, batch_tokens: int
    ) -> Iterator[Batch]:
        """Lines of training: ids, weights, images."""
        rows = Rows(tokenizer, IMAGE_TOKENS)
        return ocr_batches(rows, recipe.seed, first_pool, batch_tokens, (recipe.least, recipe.most))

    def loss(
        self, model: Qwen3_5MoeWithMtp, batch: Batch, recipe: VisionRecipe, progress: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross entropy of answers and drafts plus the routers' balance loss, and the means to
        report.
        """
        ids, weights, images = batch
        hidden, positions, routers = model.read(ids, images, routers=True)
        wanted = weights[:, 1:] > 0  # [B, L - 1]
        answer = _entropy(model, hidden[:, :-1], ids[:, 1:], wanted)
        means = {"answer_loss": answer.detach()}
        text = model.config.text_config
        balance = load_balancing_loss_func(tuple(routers), text.num_experts, text.num_experts_per_tok)
        total = answer + recipe.router_aux * balance
        if progress >= recipe.draft_from:
            lookahead = model.lookahead(ids, hidden, positions)[:, :-1]
            drafts = _entropy(model, lookahead, ids[:, 2:], wanted[:, 1:])
            total = total + recipe.draft_weight * drafts
            means["draft_loss"] = drafts.detach()
        return total, means

    def watch(self, model: Qwen3_5MoeWithMtp, tokenizer: PreTrainedTokenizerFast, n: int) -> dict[str, float]:
        """Return the shares of correct lines and correct tokens, over held-out lines."""
        asked = list(itertools.islice(lines("test", DEV_SEED), n))
        exact, characters = forced(model, Rows(tokenizer, IMAGE_TOKENS), asked)
        return {"dev_exact": round(sum(exact) / n, 4), "dev_tokens": round(characters, 4)}

    def export(self, model: Qwen3_5MoeWithMtp, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write weights in bfloat16, configurations, processor and tokenizer."""
        copy = Qwen3_5MoeWithMtp(model.config)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = model.generation_config
        copy.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tidy(folder, {"architectures": ["Qwen3_5MoeForConditionalGeneration"]})
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")


PROCESSOR = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": MERGE,
    "patch_size": PATCH,
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 65536, "shortest_edge": 1024},
    "temporal_patch_size": 2,
}
"""Content of ``preprocessor_config.json``. ``size`` limits the pixels of an image, not the edges."""


def _entropy(model: Qwen3_5MoeWithMtp, hidden: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """The mean loss of predicting ``ids`` [B, M] from ``hidden`` [B, M, H] where ``wanted`` [B, M]."""
    return F.cross_entropy(model.lm_head(hidden[wanted]).float(), ids[wanted])


def evaluate(args: argparse.Namespace) -> None:
    """Exact lines of a checkpoint folder on the fixed test set, computed in float32."""
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.checkpoint)
    model = Qwen3_5MoeWithMtp.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    asked = ocr_test_set(args.n)
    began = time.time()
    answers = read_lines(model, Rows(tokenizer, IMAGE_TOKENS), asked)
    right = [is_right(answer, line) for answer, line in zip(answers, asked, strict=True)]
    for line, answer, hit in zip(asked, answers, right, strict=True):
        if args.show_errors and not hit:
            print(f"{line.text}  read as {answer!r}")
    measured: dict[str, object] = {"seconds": round(time.time() - began, 1)}
    measured["decoding"] = "greedy, float32, transformers generate"
    write_result(
        args, "spool_vision", {"task": "ocr-mini", "lines": len(asked), "exact": sum(right)} | measured
    )


def main() -> None:
    """Parse the command line and run the command."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    add_train_parser(commands, SpoolVision())
    add_evaluate_parser(commands).set_defaults(call=evaluate)
    args = top.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
