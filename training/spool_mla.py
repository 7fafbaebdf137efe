"""Trains ``spool-mla``, the second bundled checkpoint: a small DeepSeek-V3 with an MTP layer, on gsm-mini.

The main model is ``transformers``' own class from a random start. Run from the repository root::

    python -m training.spool_mla train --out runs/spool-mla
    python -m training.spool_mla evaluate --checkpoint weft/checkpoints/spool-mla
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from training.chat import prompt_ids, report, solve_ids, stop_ids, tidy
from training.loop import Batch, Recipe, Script, add_evaluate_parser, add_train_parser, held_out
from training.mtp import DeepseekV3WithMtp, cross_entropy, draft_hits
from training.muon import muon_and_adamw
from weft.eval.gsm_mini import score, test_set

TOKENIZER = Path(__file__).resolve().parents[1] / "weft/checkpoints/spool-text"
DRAFTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaRecipe(Recipe):
    """Add the rates and loss weights of ``spool-mla``.

    ``matrix_lr`` is Muon's rate for matrices; ``lr`` is AdamW's rate for the rest. ``mtp_weight`` weights the
    loss of the first draft. ``chain_weight`` weights the second and third drafts, trained after the share
    ``chain_from`` of the run. One row in ``mtp_rows`` has drafts. ``balance`` is the step of the routers'
    correction biases.
    """

    minutes: float = 72.0
    matrix_lr: float = 4e-3
    mtp_weight: float = 0.3
    chain_weight: float = 0.1
    chain_from: float = 0.75
    mtp_rows: int = 2
    balance: float = 0.001


def new_config(tokenizer: PreTrainedTokenizerFast) -> DeepseekV3Config:
    """4 layers, the first dense; 8 experts in 2 groups, 2 active in the better group, and a shared one."""
    stops = stop_ids(tokenizer)
    return DeepseekV3Config(  # type: ignore[call-arg]
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_interleave=True,
        tie_word_embeddings=True,
        eos_token_id=stops[0],
        pad_token_id=stops[1],
        bos_token_id=None,
    )


def count_choices(
    router: DeepseekV3TopkRouter, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add a forward pass's choices to the router's ``load``, float [experts]."""
    if router.training:
        router.load += torch.bincount(outputs[2].flatten(), minlength=router.num_experts).float()


def routers(model: DeepseekV3WithMtp) -> list[DeepseekV3TopkRouter]:
    """Return all routers; the router of the MTP layer is last."""
    return [module for module in model.modules() if isinstance(module, DeepseekV3TopkRouter)]


class SpoolMla(Script[MlaRecipe]):
    """Supply the model, the losses and the watched figures."""

    recipe = MlaRecipe

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerFast:
        """Return the tokenizer of ``spool-text``."""
        return PreTrainedTokenizerFast.from_pretrained(TOKENIZER)

    def new_model(self, tokenizer: PreTrainedTokenizerFast) -> DeepseekV3WithMtp:
        """A random model in float32."""
        # Rows are short: plain attention has a much faster backward pass on a CPU than the fused one.
        model = DeepseekV3WithMtp._from_config(
            new_config(tokenizer),
            experts_implementation="grouped_mm",
            attn_implementation="eager",
            dtype=torch.float32,
        )
        stops = stop_ids(tokenizer)
        model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1])
        for router in routers(model):
            router.load = torch.zeros(router.num_experts)
            router.register_forward_hook(count_choices)
        return model

    def optimizers(self, model: DeepseekV3WithMtp, recipe: MlaRecipe) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the layers; AdamW for embeddings, norms and routers."""
        return muon_and_adamw(model, recipe.matrix_lr, recipe.lr, recipe.weight_decay)

    def loss(
        self, model: DeepseekV3WithMtp, batch: Batch, recipe: MlaRecipe, progress: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted cross entropy of the next token, and of the drafts where the answer is."""
        ids, weights = batch
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        wanted = weights[:, 1:] > 0  # [B, L - 1]
        each = cross_entropy(model, hidden[:, :-1], ids[:, 1:], wanted)
        weight = weights[:, 1:][wanted]
        total = (each * weight).sum() / weight.sum()
        means = {"answer_loss": each.detach()[weight == 1].mean()}
        steps = DRAFTS if progress >= recipe.chain_from and recipe.chain_weight else 1
        some = slice(None, None, recipe.mtp_rows)
        ids, answer = ids[some], weights[some] == 1
        for s, out in enumerate(model.chain(ids, hidden[some], steps)):
            drafts = cross_entropy(model, out[:, :-1], ids[:, 2 + s :], answer[:, 2 + s :]).mean()
            total = total + (recipe.chain_weight if s else recipe.mtp_weight) * drafts
            means[f"draft_{s + 1}_loss"] = drafts.detach()
        return total, means

    def counters(self, model: DeepseekV3WithMtp) -> list[Tensor]:
        """The experts' loads."""
        return [router.load for router in routers(model)]

    def after_step(self, model: DeepseekV3WithMtp, recipe: MlaRecipe) -> None:
        """Balance without a loss: raise the correction of experts below the mean load, lower the others'."""
        for router in routers(model):
            router.e_score_correction_bias += recipe.balance * (router.load.mean() - router.load).sign()
            router.load.zero_()

    def watch(self, model: DeepseekV3WithMtp, tokenizer: PreTrainedTokenizerFast, n: int) -> dict[str, float]:
        """Share solved, and shares of right drafts."""
        asked = held_out(n)
        prompts = [prompt_ids(tokenizer, problem) for problem in asked]
        replies = solve_ids(model, tokenizer, prompts)
        texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
        return {"dev_exact": round(score(texts, asked) / len(asked), 4)} | acceptance(model, prompts, replies)

    def export(self, model: DeepseekV3WithMtp, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write weights in bfloat16 (correction biases in float32), configurations and tokenizer.

        The MTP layer gets copies of embedding and output head, as in the published checkpoints.
        """
        copy = DeepseekV3WithMtp(model.config)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = model.generation_config
        copy.to(torch.bfloat16)
        for router, known in zip(routers(copy), routers(model), strict=True):
            router.e_score_correction_bias = known.e_score_correction_bias.clone()
        copy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        mtp = f"model.layers.{model.config.num_hidden_layers}"
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"{mtp}.{name}.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        names = {"num_nextn_predict_layers": 1, "n_routed_experts": model.config.n_routed_experts}
        choice = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        tidy(folder, {"architectures": ["DeepseekV3ForCausalLM"]} | names | choice)


def acceptance(
    model: DeepseekV3WithMtp, prompts: list[list[int]], replies: list[list[int]]
) -> dict[str, float]:
    """Return the shares of drafts that greedy decoding accepts, with 1 and with 3 drafts per step.

    ``accepted_1`` is the accepted share of single drafts. ``accepted_1_of_3`` and following are the shares of
    steps with three drafts in which the first, the first two, or all three are accepted. The first token of a
    reply is never drafted.
    """
    made = dict.fromkeys((1, DRAFTS), 0)
    right = {k: [0] * k for k in made}
    for prompt, reply in zip(prompts, replies, strict=True):
        hits = draft_hits(model, prompt, reply, DRAFTS).cumprod(0).sum(0).tolist()  # runs of hits
        for k, counts in right.items():
            known = 0
            while known < len(hits):
                run = min(hits[known], k)
                made[k] += 1
                for s in range(run):
                    counts[s] += 1
                known += 1 + run
    result = {"accepted_1": round(right[1][0] / max(1, made[1]), 4)}
    for s in range(DRAFTS):
        result[f"accepted_{s + 1}_of_{DRAFTS}"] = round(right[DRAFTS][s] / max(1, made[DRAFTS]), 4)
    return result


def evaluate(args: argparse.Namespace) -> None:
    """Greedy accuracy and acceptance of a checkpoint folder on the fixed test set, in float32."""
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.checkpoint)
    model = DeepseekV3WithMtp.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    asked = test_set(args.n)
    began = time.time()
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    replies = solve_ids(model, tokenizer, prompts)
    answers = tokenizer.batch_decode(replies, skip_special_tokens=True)
    measured: dict[str, object] = {"drafts": acceptance(model, prompts, replies)}
    measured["seconds"] = round(time.time() - began, 1)
    measured["decoding"] = (
        "greedy, float32, transformers generate; drafts as greedy decoding would accept them"
    )
    report(args, "spool_mla", asked, answers, measured)


def main() -> None:
    """Parse the command line and run the command."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    add_train_parser(commands, SpoolMla())
    add_evaluate_parser(commands).set_defaults(call=evaluate)
    args = top.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
