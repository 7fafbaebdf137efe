"""A start for ``weft train grpo``, and the mismatch of other forward passes.

python -m training.grpo start FOLDER --noise 0.2      # spool-text with noise in every matrix
python -m training.grpo compare FOLDER                # rollouts of Weft against weft.train and transformers
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import weft
from weft import LLM, SamplingParams
from weft.eval.gsm_mini import problems
from weft.train.checkpoints import write_model
from weft.train.grpo import Mismatch
from weft.train.policy import Policy, Scored

SOURCE = Path(weft.__file__).parent / "checkpoints" / "spool-text"


def start(folder: Path, noise: float, seed: int) -> None:
    """Write spool-text with Gaussian noise of ``noise`` standard deviations of each matrix to ``folder``."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        exact = tensor.float()
        drawn = torch.randn(exact.shape, generator=generator)
        return (exact + noise * exact.std() * drawn).to(tensor.dtype)

    tensors = load_file(SOURCE / "model.safetensors")
    write_model(folder, SOURCE, ((name, noisy(tensor)) for name, tensor in sorted(tensors.items())))


def compare(folder: str, prompts: int, group: int) -> dict[str, Any]:
    """Return the mismatch of weft.train and of transformers (eager, same dtype) with Weft's rollouts."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", experts_implementation="eager"
    ).eval()
    found = {"weft.train": Mismatch(), "transformers": Mismatch()}
    with LLM(folder, threads=torch.get_num_threads()) as llm, torch.no_grad():
        policy = Policy(llm.config)
        chats = [
            [{"role": "user", "content": one.question}]
            for one in itertools.islice(problems("train", 0), prompts)
        ]
        params = SamplingParams(n=group, logprobs=0, max_tokens=256, seed=0)
        for request in llm.chat(chats, params, use_tqdm=False):
            for one in request.outputs:
                assert one.logprobs is not None
                rollout = torch.tensor([next(iter(each.values())).logprob for each in one.logprobs])
                prompt = request.prompt_token_ids
                ids = prompt + one.token_ids
                found["weft.train"].add(policy.logprobs([Scored(ids, len(prompt))])[0], rollout)
                logits = reference(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                tokens = torch.tensor(one.token_ids).unsqueeze(1)
                own = logits.float().log_softmax(-1).gather(1, tokens).squeeze(1)
                found["transformers"].add(own, rollout)
    return {
        name: {"kl": one.kl, "unequal": one.unequal, "tokens": one.tokens, "largest": one.largest}
        for name, one in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("start")
    make.add_argument("folder", type=Path)
    make.add_argument("--noise", type=float, default=0.2)
    make.add_argument("--seed", type=int, default=0)
    measure = commands.add_parser("compare")
    measure.add_argument("folder")
    measure.add_argument("--prompts", type=int, default=16)
    measure.add_argument("--group", type=int, default=4)
    given = parser.parse_args()
    if given.command == "start":
        start(given.folder, given.noise, given.seed)
    else:
        print(json.dumps(compare(given.folder, given.prompts, given.group), indent=1))


if __name__ == "__main__":
    main()
