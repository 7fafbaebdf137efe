"""Average the weights of several checkpoints of one model, from runs that continue one another.

python -m training.average OUT CHECKPOINT CHECKPOINT ...

Each run ends at a low rate in the same basin. The mean has fewer of the errors of a single run. Source:
Izmailov et al. 2018, arXiv 1803.05407. Everything except the weights comes from the last checkpoint.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def mean_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Computed in float64, in the dtypes of the last. Raises ValueError if names or shapes differ."""
    last = parts[-1]
    made = {}
    for name, weight in last.items():
        for part in parts:
            if part.keys() != last.keys() or part[name].shape != weight.shape:
                raise ValueError(f"{name}: the checkpoints are not of one model")
        made[name] = torch.stack([part[name].double() for part in parts]).mean(0).to(weight.dtype)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the checkpoint to write; it must not exist")
    parser.add_argument("checkpoint", type=Path, nargs="+", help="folders, at least two")
    args = parser.parse_args()
    if len(args.checkpoint) < 2:
        parser.error("one checkpoint is its own mean: give at least two")
    made = mean_of([load_file(folder / WEIGHTS) for folder in args.checkpoint])
    shutil.copytree(args.checkpoint[-1], args.out)
    save_file(made, args.out / WEIGHTS, metadata={"format": "pt"})
    print(f"the mean of {len(args.checkpoint)} checkpoints is in {args.out}")


if __name__ == "__main__":
    main()
