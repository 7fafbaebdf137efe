"""The table of causal classes of transformers that the generic backend serves: judge each class.

python -m tests.support.generic_table > docs/reference/transformers.md
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers

from tests.models.conftest import Paged
from tests.support.generic_models import classes, full_name, greedy, tiny_model
from tests.support.ranks import on_ranks
from weft.common.errors import ConfigError
from weft.models.generic.load import load
from weft.models.generic.probe import probe_folder
from weft.types.layout import Layout

CPU = torch.device("cpu")
NEW, PROMPTS = 8, (31, 7, 19, 12)
SERVED, REFUSED, NOT_JUDGED, WRONG = "served", "refused", "not judged", "wrong"
CLOSE = 1e-5

HEAD = """# Classes of transformers

The table lists every `ForCausalLM` and `LMHeadModel` class of transformers {version},
with a small random model of three layers in float64. See [Models of transformers](../generic.md).

| result | meaning | classes |
|---|---|---|
| served | greedy tokens of four prompts, in chunks and mixed steps, equal those of transformers | {served} |
| refused | Weft names the reason at the start | {refused} |
| not judged | transformers cannot make or run the small model; Weft may serve real checkpoints | {other} |

`TP 2`: two ranks give the logits of one rank.
Classes with an own implementation in Weft use that implementation by default.
`make test-transformers` checks this page, and
`python -m tests.support.generic_table > docs/reference/transformers.md` writes this page.

| class | result | TP 2 | reason |
|---|---|---|---|
"""


class Verdict(NamedTuple):
    """The result for one class."""

    result: str
    ranks: str = ""
    reason: str = ""


def generated(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate greedy tokens in chunks of 6, with decode rows in the same steps."""
    rig = Paged(model, block_size=4, blocks=120)
    rows = [rig.sequence(prompt) for prompt in prompts]
    ends = [len(prompt) + count for prompt in prompts]
    while True:
        going = [row for row, end in zip(rows, ends, strict=True) if row.computed < end - 1]
        if not going:
            return [row.ids for row in rows]
        left = {id(row): len(row.ids) - row.computed for row in going}
        prefill = [(row, min(6, left[id(row)])) for row in going if left[id(row)] > 1]
        rig.step(prefill, [(row, 1) for row in going if left[id(row)] == 1])
        for row in going:
            if row.computed == len(row.ids):
                row.ids.append(int(row.logits[-1].argmax()))


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]


def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of two prompts, computed in three steps."""
    rig = Paged(model)
    one, other = (rig.sequence(prompt) for prompt in prompts_of(17, 9))
    rig.step([(one, 9), (other, 4)])
    rig.step([(one, 7), (other, 4)])
    rig.step([], [(one, 1), (other, 1)])
    return torch.stack(one.logits + other.logits)


def judge(name: str, folder: str) -> Verdict:
    """Return the verdict on the class ``name``. A tiny checkpoint is saved in ``folder``."""
    try:
        reference = tiny_model(name)
        reference.save_pretrained(folder)
    except Exception as error:  # of transformers: many types
        return Verdict(NOT_JUDGED, "", _line(error))
    try:
        spec = probe_folder(folder, full_name(name))
    except ConfigError as error:
        return Verdict(REFUSED, "", _line(error))
    prompts = prompts_of(*PROMPTS)
    try:
        expected = [greedy(reference, prompt, NEW) for prompt in prompts]
    except Exception as error:  # of transformers: many types
        return Verdict(NOT_JUDGED, "", _line(error))
    try:
        model = load(folder, spec, torch.float64, CPU, progress=False)
    except ConfigError as error:
        return Verdict(REFUSED, "", _line(error))
    del reference
    if generated(model, prompts, NEW) != expected:
        return Verdict(WRONG)
    one = logits_of(model)
    found = on_ranks(
        Layout(tensor=2),
        lambda mesh: logits_of(load(folder, spec, torch.float64, CPU, progress=False, mesh=mesh)),
    )
    close = float((found[0] - one).abs().max()) <= CLOSE * float(one.abs().max())
    return Verdict(SERVED, "yes") if close else Verdict(WRONG, "wrong")


def _line(error: Exception) -> str:
    """Return the first informative line of an error, without characters that break a table."""
    text = error.message if isinstance(error, ConfigError) else str(error) or repr(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[1] if len(lines) > 1 and "validation error" in lines[0].lower() else lines[0]
    for lead in (" cannot be served with the implementation of transformers: ", "ForCausalLM: "):
        line = line.split(lead, 1)[-1]
    return line[:200].replace("|", "/").replace("<", "(").replace(">", ")")


def page(verdicts: dict[str, Verdict]) -> str:
    """Return the page."""
    counts = Counter(verdict.result for verdict in verdicts.values())
    head = HEAD.format(
        version=transformers.__version__,
        served=counts[SERVED],
        refused=counts[REFUSED],
        other=counts[NOT_JUDGED],
    )
    rows = [f"| {name} | {one.result} | {one.ranks} | {one.reason} |" for name, one in verdicts.items()]
    return head + "\n".join(rows) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    verdicts = {}
    for name in classes():
        with tempfile.TemporaryDirectory() as folder:
            verdicts[name] = judge(name, folder)
        print(name, verdicts[name].result, file=sys.stderr)
    sys.stdout.write(page(verdicts))


if __name__ == "__main__":
    main()
