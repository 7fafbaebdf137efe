"""Training rows of the bundled models: problems rendered as chats or plain completions, batched by length."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from training.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, SYSTEM_PROMPTS, TURN_END, TURN_START
from training.tools import chat
from weft.eval.gsm_mini import Problem, is_held_out_pair, problems
from weft.eval.gsm_story import MAX_VALUE, Rng, Step
from weft.eval.tools_mini import ToolProblem, tool_problems

POOL_ROWS = 3000  # rows sorted by length together
PLAIN_SHARE, TWO_TURN_SHARE, SYSTEM_SHARE = 0.12, 0.06, 0.15
DRILL_SHARE = 0.35  # share of rows with worked lines and no story: most of their tokens teach arithmetic
DRILL_LINES = 12
RECALL_LINES = 10


@dataclass(frozen=True, slots=True)
class Row:
    """Hold token ids and, for each id, the loss weight of predicting it."""

    ids: list[int]
    weights: list[float]


def draw_step(rng: random.Random) -> Step:
    """Return a worked line of the forms in stories. The operands are never a held-out pair."""
    while True:
        op = rng.choices("+-x/", (6, 6, 3, 5))[0]
        if op == "+":
            step = Step(
                "+", rng.randint(2, rng.choice((30, 99, 300))), rng.randint(2, rng.choice((12, 60, 99)))
            )
        elif op == "-":
            a = rng.randint(3, rng.choice((30, 99, 200, 400)))
            step = Step("-", a, rng.randint(2, min(a - 1, rng.choice((12, 60, a)))) if a > 3 else 2)
        else:
            small, large = rng.randint(2, 9), rng.randint(2, rng.choice((10, 25, 40)))
            pair = (small, large) if rng.random() < 0.5 else (large, small)
            step = Step("x", *pair) if op == "x" else Step("/", small * large, small)
        shown = (step, *step.parts())
        if 0 < step.result <= MAX_VALUE and not any(is_held_out_pair(s.op, s.a, s.b) for s in shown):
            return step


class Encoder:
    """Turn problems into rows in the forms that a server receives.

    ``tool_share`` of the rows offer tools; ``recall_share`` have random lines to repeat.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        question_weight: float,
        tool_share: float = 0.0,
        recall_share: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.question_weight = question_weight
        self.tool_share = tool_share
        self.recall_share = recall_share

    def _turn(self, problem: Problem, rng: random.Random, first: bool) -> list[tuple[str, float]]:
        """Return a prompt and its reply in chat form. The first turn sometimes has a system message."""
        messages = [("user", problem.question)]
        if first and rng.random() < SYSTEM_SHARE:
            messages.insert(0, ("system", rng.choice(SYSTEM_PROMPTS)))
        prompt = "" if first else "\n"
        prompt += "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)
        prompt += f"{TURN_START}assistant\n"
        return [(prompt, self.question_weight), (problem.solution + TURN_END, 1.0)]

    def drill(self, rng: random.Random) -> Row:
        """Return a row of worked lines. Operands are unpredictable, so only the tokens after them have a
        weight.
        """
        lines = [draw_step(rng).text() + "\n" for _ in range(DRILL_LINES)]
        counts = [i >= line.index("=") for line in lines for i in range(len(line))]
        encoded = self.tokenizer("".join(lines), add_special_tokens=False, return_offsets_mapping=True)
        weights = [float(counts[begin]) for begin, _ in encoded["offset_mapping"]]
        return Row(encoded["input_ids"], weights)

    def recall(self, rng: random.Random) -> Row:
        """Return random lines followed by the same lines in another order.

        In the second half every token after the first of a line has a weight. Names and results of tools have
        to be copied from far above in the same way.
        """
        words = range(len(SPECIAL_TOKENS), len(self.tokenizer))
        line_end, *digits = self.tokenizer.encode("\n0123456789", add_special_tokens=False)
        heads = rng.sample(words, rng.randint(3, RECALL_LINES))
        kinds: list[Sequence[int]] = [digits if rng.random() < 0.3 else words for _ in heads]
        lines = [
            [head, *rng.choices(kind, k=rng.randint(2, 9)), line_end]
            for head, kind in zip(heads, kinds, strict=True)
        ]
        again = rng.sample(lines, len(lines))
        ids = [i for line in lines + again for i in line]
        weights = [0.0 for line in lines for _ in line]
        weights += [weight for line in again for weight in (0.0, *(1.0 for _ in line[1:]))]
        return Row(ids, weights)

    def encode(self, source: Iterator[Problem], rng: random.Random) -> Row:
        """Return one row: a chat of one or two turns, a plain completion, or a drill."""
        if rng.random() < DRILL_SHARE:
            return self.drill(rng)
        if rng.random() < PLAIN_SHARE:
            problem = next(source)
            prompt = f"Question: {problem.question}\nAnswer:"
            pieces = [(prompt, self.question_weight), (f" {problem.solution}{END_OF_TEXT}", 1.0)]
        else:
            turns = 2 if rng.random() < TWO_TURN_SHARE else 1
            pieces = [p for turn in range(turns) for p in self._turn(next(source), rng, turn == 0)]
        return self._join(pieces)

    def tools(self, source: Iterator[ToolProblem], rng: random.Random, draws: Rng) -> Row:
        """A chat with tools, of one to three questions."""
        return self._join(chat(next(source), rng, draws, self.question_weight))

    def _join(self, pieces: list[tuple[str, float]]) -> Row:
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in pieces:
            new = self.tokenizer.encode(text, add_special_tokens=False)
            ids += new
            weights += [weight] * len(new)
        return Row(ids, weights)


def batches(
    encoder: Encoder, seed: int, first_pool: int, batch_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless batches: ids [B, L] (int64) and weights [B, L] (float32, 0 on padding).

    B x L is at most ``batch_tokens``. Rows of similar length share a batch, which keeps padding small. Every
    row starts at position 0. Padding is on the right, invisible to a causal model. Different values of
    ``first_pool`` give different problems: workers and resumed runs read new data.
    """
    pad = encoder.tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    for pool in itertools.count(first_pool):
        rng = random.Random(f"{seed} {pool}")
        source = problems("train", seed * 1_000_000 + pool)
        with_tools = tool_problems("train", seed * 1_000_000 + pool)
        draws = Rng(f"tools {seed} {pool}")
        made = round(POOL_ROWS * encoder.tool_share)
        recalled = round(POOL_ROWS * encoder.recall_share)
        drawn = [encoder.encode(source, rng) for _ in range(POOL_ROWS - made - recalled)]
        drawn += [encoder.tools(with_tools, rng, draws) for _ in range(made)]
        drawn += [encoder.recall(rng) for _ in range(recalled)]
        rows = sorted(drawn, key=lambda row: len(row.ids))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row.ids) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            length = max(len(row.ids) for row in group)
            ids = torch.tensor([row.ids + [pad] * (length - len(row.ids)) for row in group])
            weights = torch.tensor([row.weights + [0.0] * (length - len(row.ids)) for row in group])
            yield ids, weights
