"""Trains ``spool-text``, the bundled checkpoint: a small Qwen3-MoE on generated word problems (gsm-mini).

Uses the ``transformers`` model class from a random start, so the checkpoint owes nothing to this engine. Run
from the repository root::

    python -m training.spool_text train --out runs/spool-text
    python -m training.spool_text evaluate --checkpoint weft/checkpoints/spool-text
"""

import argparse
import itertools
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from training.rows import Encoder, batches
from training.tokenizer import END_OF_TEXT, TURN_END, build_tokenizer
from weft.eval.gsm_mini import Problem, problems, score, test_set

DEV_SEED = 77  # the held-out sample watched during training; the 500 test problems have another seed
MAX_NEW_TOKENS = 110  # the longest worked solution is shorter
LOADING_NOTES = ("is_local", "local_files_only")  # say how the tokenizer was loaded, not what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run depends on. ``batch_tokens`` counts padding; ``router_aux`` weighs the balance loss."""

    seed: int = 1
    steps: int = 6800
    batch_tokens: int = 4096
    lr: float = 2e-3
    lr_end: float = 2e-5
    warmup: int = 100
    weight_decay: float = 0.05
    router_aux: float = 0.01
    question_weight: float = 0.1
    bf16: bool = True


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that end a reply: end of turn, end of text."""
    return [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """A random spool-text in float32: 4 layers, 8 experts of which 2 are active, tied embeddings."""
    stops = stop_ids(tokenizer)
    config = Qwen3MoeConfig(
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


@torch.no_grad()
def solve(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: list[Problem], batch: int = 50
) -> list[str]:
    """Greedy chat answers to ``asked``, in order; prompts of like length together, padded on the left."""
    prompts: list[list[int]] = []
    for problem in asked:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    order = sorted(range(len(asked)), key=lambda i: len(prompts[i]))
    answers = [""] * len(asked)
    for begin in range(0, len(order), batch):
        chunk = order[begin : begin + batch]
        width = max(len(prompts[i]) for i in chunk)
        gaps = [width - len(prompts[i]) for i in chunk]
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * gap + prompts[i] for gap, i in zip(gaps, chunk, strict=True)])  # [B, L]
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])  # [B, L]
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        for i, answer in zip(chunk, texts, strict=True):
            answers[i] = answer
    return answers


def lr_at(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to ``lr_end``."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = min(1.0, (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup))
    return recipe.lr_end + 0.5 * (recipe.lr - recipe.lr_end) * (1 + math.cos(math.pi * done))


def export(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, configurations and tokenizer as a Hugging Face checkpoint folder."""
    copy = Qwen3MoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The names that this model family has on the hub, beside those of the installed transformers.
    for name, extra in (
        ("config.json", {"num_experts": model.config.num_experts}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        known = json.loads((folder / name).read_text())
        known = {key: value for key, value in (known | extra).items() if key not in LOADING_NOTES}
        (folder / name).write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    os.chmod(folder / "model.safetensors", 0o644)


class Run:
    """A training run in a folder: ``state.pt`` to resume from, ``checkpoint/``, ``curve.json``."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        folder.mkdir(parents=True, exist_ok=True)
        words = folder / "tokenizer"
        saved = words.exists()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(words) if saved else build_tokenizer(words)
        torch.manual_seed(recipe.seed)
        self.model = new_model(self.tokenizer)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.lr,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.step = self.tokens = self.pool = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        if (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.tokens, self.pool = state["step"], state["tokens"], state["pool"]
            self.seconds, self.curve = state["seconds"], state["curve"]

    def save(self) -> None:
        """Write everything; a resumed run reads problems that this one has not."""
        state = {name: getattr(self, name) for name in ("step", "tokens", "pool", "seconds", "curve")}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / "state.pt")
        export(self.model, self.tokenizer, self.folder / "checkpoint")
        text = json.dumps({"recipe": asdict(self.recipe), "curve": self.curve}, indent=1)
        (self.folder / "curve.json").write_text(text + "\n")

    def update(self, ids: Tensor, weights: Tensor) -> float:
        """One optimizer step on rows [B, L]; returns the answer tokens' loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.recipe, self.step)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bf16):
            total, loss = loss_of(self.model, ids, weights, self.recipe.router_aux)
        total.backward()
        if dist.is_initialized():
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            flat = torch.cat([grad.view(-1) for grad in grads])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids.numel() * (dist.get_world_size() if dist.is_initialized() else 1)
        return float(loss)

    def exact(self, asked: list[Problem]) -> float:
        """The share of ``asked`` that is solved."""
        self.model.eval()
        right = score(solve(self.model, self.tokenizer, asked), asked)
        self.model.train()
        return round(right / len(asked), 4)


def train(args: argparse.Namespace) -> None:
    """Run or resume a training run in ``args.out``, one process with one thread for each worker.

    Processes that meet once a step lose less to a busy neighbor than threads that meet in every operator.
    """
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    Run(args.out, recipe)  # builds the tokenizer before the workers read it
    torch.multiprocessing.spawn(work, (args, recipe), nprocs=args.workers)


def work(rank: int, args: argparse.Namespace, recipe: Recipe) -> None:
    """One worker of a run; rank 0 also evaluates, reports and saves."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(args.out / f"store-{os.getppid()}"), args.workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.workers)
    run = Run(args.out, recipe)
    if rank == 0:
        print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, step {run.step}", flush=True)
    dev = list(itertools.islice(problems("test", DEV_SEED), args.dev))
    encoder = Encoder(run.tokenizer, recipe.question_weight)
    first_pool, run.pool = run.pool + 1000 * rank, run.pool + 1000 * args.workers
    stream = batches(encoder, recipe.seed, first_pool, recipe.batch_tokens // args.workers)
    began, losses = time.time() - run.seconds, []
    while run.step < recipe.steps:
        losses.append(run.update(*next(stream)))
        due = run.step % args.eval_every == 0 or run.step == recipe.steps
        if rank or (run.step % args.log and not due):
            continue
        run.seconds = round(time.time() - began, 1)
        row: dict[str, float] = {"step": run.step, "tokens": run.tokens, "seconds": run.seconds}
        row["answer_loss"] = round(sum(losses) / len(losses), 5)
        losses.clear()
        if due:
            row["dev_exact"] = run.exact(dev)
        run.curve.append(row)
        rate = run.tokens / run.seconds
        print(json.dumps(row), f"lr {lr_at(recipe, run.step):.2e} {rate:.0f} tok/s", flush=True)
        if due:
            run.save()
    dist.barrier()
    dist.destroy_process_group()


def evaluate(args: argparse.Namespace) -> None:
    """Greedy accuracy of a checkpoint folder on the fixed test set, computed in float32."""
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.checkpoint)
    model = Qwen3MoeForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    asked = test_set(args.n)
    began = time.time()
    answers = solve(model, tokenizer, asked)
    right = score(answers, asked)
    result: dict[str, object] = {
        "task": "gsm-mini",
        "problems": len(asked),
        "exact": right,
        "accuracy": round(right / len(asked), 4),
        "decoding": "greedy, float32, transformers generate",
        "seconds": round(time.time() - began, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": args.machine,
        "command": "python -m training.spool_text evaluate --checkpoint weft/checkpoints/spool-text",
    }
    if args.curve:
        curve = json.loads(args.curve.read_text())
        last = curve["curve"][-1]
        result["training"] = curve["recipe"] | {key: last[key] for key in ("step", "tokens", "seconds")}
    for problem, answer in zip(asked, answers, strict=True):
        if args.show_errors and score([answer], [problem]) == 0:
            print(f"--- {problem.question}\nwanted: {problem.solution!r}\ngot:    {answer!r}")
    print(json.dumps(result, indent=1))
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    defaults = argparse.ArgumentDefaultsHelpFormatter
    run = commands.add_parser("train", help="train or resume", formatter_class=defaults)
    run.set_defaults(call=train)
    run.add_argument("--out", type=Path, required=True, help="folder of the run; resumes if it has a state")
    for name, value in asdict(Recipe()).items():
        flag, text = "--" + name.replace("_", "-"), f"recipe: {name.replace('_', ' ')}"
        if isinstance(value, bool):
            run.add_argument(flag, action=argparse.BooleanOptionalAction, default=value, help=text)
        else:
            run.add_argument(flag, type=type(value), default=value, help=text)
    run.add_argument("--log", type=int, default=50, help="steps between progress lines")
    run.add_argument("--eval-every", type=int, default=400, help="steps between evaluations and checkpoints")
    run.add_argument("--workers", type=int, default=2, help="processes of one thread that share each step")
    run.add_argument("--dev", type=int, default=100, help="held-out problems watched during training")
    check = commands.add_parser("evaluate", help="accuracy on the test set", formatter_class=defaults)
    check.set_defaults(call=evaluate)
    check.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder")
    check.add_argument("--n", type=int, default=500, help="problems")
    check.add_argument("--result", type=Path, help="write the numbers here as JSON")
    check.add_argument("--curve", type=Path, help="curve.json of the run, to put its recipe into the result")
    check.add_argument("--machine", default="", help="the machine in words, for the result")
    check.add_argument("--show-errors", action="store_true", help="print the problems that were missed")
    check.add_argument("--threads", type=int, default=2, help="CPU threads")
    return top


def main() -> None:
    """Parse the command line and do what it asks."""
    args = parser().parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
