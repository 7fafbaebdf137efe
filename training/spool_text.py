"""Trains ``spool-text``, the bundled checkpoint: a small Qwen3-MoE on generated word problems (gsm-mini).

Uses the ``transformers`` model class from a random start, so the checkpoint owes nothing to this engine. Run
from the repository root::

    python -m training.spool_text train --out runs/spool-text
    python -m training.spool_text evaluate --checkpoint weft/checkpoints/spool-text
"""

import argparse
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from training.chat import report, solve, stop_ids, tidy
from training.loop import DEV_SEED, Batch, Recipe, Script, add_evaluate_parser, add_train_parser, held_out
from training.muon import muon_and_adamw
from training.tokenizer import TOOL_TEMPLATE, build_tokenizer
from training.tools import ask
from weft.eval.gsm_mini import score, test_set
from weft.eval.tools_mini import tool_problems
from weft.eval.tools_score import totals


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRecipe(Recipe):
    """``router_aux`` weighs the routers' balance loss; ``matrix_lr`` is Muon's rate, 0 for AdamW alone."""

    router_aux: float = 0.01
    matrix_lr: float = 0.0


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """A random spool-text in float32: 4 layers, 8 experts of which 2 are active, tied embeddings."""
    stops = stop_ids(tokenizer)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=stops[0],
        pad_token_id=stops[1],
        bos_token_id=None,
    )
    # Rows are short: plain attention has a much faster backward pass on a CPU than the fused one.
    model = Qwen3MoeForCausalLM._from_config(
        config, experts_implementation="grouped_mm", attn_implementation="eager", dtype=torch.float32
    )
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1])
    return model


def loss_of(model: Qwen3MoeForCausalLM, ids: Tensor, weights: Tensor, aux: float) -> tuple[Tensor, Tensor]:
    """Losses of rows [B, L]: weighted cross entropy plus balance term, and the mean over answer tokens."""
    out = model.model(input_ids=ids, output_router_logits=True, use_cache=False)
    wanted = weights[:, 1:] > 0  # [B, L - 1]
    hidden = out.last_hidden_state[:, :-1][wanted]  # [N, hidden]
    logits = model.lm_head(hidden).float()  # [N, vocab]
    each = F.cross_entropy(logits, ids[:, 1:][wanted], reduction="none")  # [N]
    weight = weights[:, 1:][wanted]  # [N]
    loss = (each * weight).sum() / weight.sum()
    config = model.config
    balance = load_balancing_loss_func(out.router_logits, config.num_experts, config.num_experts_per_tok)
    return loss + aux * balance, each.detach()[weight == 1].mean()


class SpoolText(Script[TextRecipe]):
    """Supply the model, its loss and the watched figures."""

    recipe = TextRecipe

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerFast:
        """Learned once for each run."""
        words = folder / "tokenizer"
        known = PreTrainedTokenizerFast.from_pretrained(words) if words.exists() else build_tokenizer(words)
        known.chat_template = TOOL_TEMPLATE
        return known

    def start_from(self, start: Path, folder: Path) -> None:
        """Copy the tokenizer, unless the run has a tokenizer already."""
        if not (folder / "tokenizer").exists():
            PreTrainedTokenizerFast.from_pretrained(start).save_pretrained(folder / "tokenizer")

    def weights(self, start: Path) -> dict[str, Tensor]:
        """Return the weights of a checkpoint of this model."""
        return Qwen3MoeForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict()

    def new_model(self, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
        """A random model in float32."""
        return new_model(tokenizer)

    def optimizers(self, model: PreTrainedModel, recipe: TextRecipe) -> list[torch.optim.Optimizer]:
        """AdamW, or Muon for the matrices of the layers."""
        if not recipe.matrix_lr:
            return super().optimizers(model, recipe)
        return muon_and_adamw(model, recipe.matrix_lr, recipe.lr, recipe.weight_decay)

    def loss(
        self, model: Qwen3MoeForCausalLM, batch: Batch, recipe: TextRecipe, progress: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted cross entropy of the next token and the routers' balance."""
        ids, weights = batch
        total, answer = loss_of(model, ids, weights, recipe.router_aux)
        return total, {"answer_loss": answer}

    def watch(
        self, model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, n: int
    ) -> dict[str, float]:
        """Return the share of solved problems, and the shares for half as many problems with tools."""
        asked = held_out(n)
        seen = {"dev_exact": round(score(solve(model, tokenizer, asked), asked) / len(asked), 4)}
        with_tools = list(itertools.islice(tool_problems("test", DEV_SEED), len(asked) // 2))
        counts = totals(ask(model, tokenizer, with_tools))
        return seen | {f"dev_{key}": round(counts[key] / counts["total"], 4) for key in ("calls", "answers")}

    def export(self, model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write weights in bfloat16, configurations and tokenizer as a Hugging Face checkpoint folder."""
        copy = Qwen3MoeForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = model.generation_config
        copy.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # Add the hub's name of the setting beside the name of the installed transformers.
        tidy(folder, {"num_experts": model.config.num_experts})


def evaluate(args: argparse.Namespace) -> None:
    """Greedy accuracy of a checkpoint folder on the fixed test set, computed in float32."""
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.checkpoint)
    model = Qwen3MoeForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    asked = test_set(args.n)
    began = time.time()
    answers = solve(model, tokenizer, asked)
    measured: dict[str, object] = {"seconds": round(time.time() - began, 1)}
    measured["decoding"] = "greedy, float32, transformers generate"
    report(args, "spool_text", asked, answers, measured)


def main() -> None:
    """Parse the command line and run the command."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    add_train_parser(commands, SpoolText())
    add_evaluate_parser(commands).set_defaults(call=evaluate)
    args = top.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
