"""Make training rows of tools-mini, and evaluate a model on tools-mini with ``transformers``."""

import json
import random

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.chat import solve_ids
from training.tokenizer import SYSTEM_PROMPTS, TURN_END, TURN_START
from weft.eval.gsm_story import Rng
from weft.eval.tools_mini import ToolProblem, another
from weft.eval.tools_score import Dialogue, read_calls

TURN_SHARES = (0.6, 0.25, 0.15)  # chats with one, two and three questions for the same tools
SYSTEM_SHARE = 0.15

Piece = tuple[str, float]
"""(text, loss weight of predicting its tokens)."""


def offer(problem: ToolProblem, system: str | None = None) -> str:
    """Return the system message with the tools of a problem, in the form of the chat template."""
    shown = [{"name": tool.name, "arguments": dict(tool.arguments)} for tool in problem.tools]
    lines = [*([system] if system else []), "<tools>", *map(json.dumps, shown), "</tools>"]
    return f"{TURN_START}system\n" + "\n".join(lines) + f"{TURN_END}\n"


def turn(problem: ToolProblem, question_weight: float) -> list[Piece]:
    """Return the pieces of a question, its calls with the tool responses, and the answer."""
    pieces: list[Piece] = [
        (f"{TURN_START}user\n{problem.question}{TURN_END}\n", question_weight),
        (f"{TURN_START}assistant\n", 0.0),
    ]
    for call in problem.calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments})
        pieces.append((f"<tool_call>\n{body}\n</tool_call>{TURN_END}", 1.0))
        shown = problem.form.replace("N", str(call.result))
        answer = f"\n{TURN_START}user\n<tool_response>\n{shown}\n</tool_response>{TURN_END}\n"
        pieces.append((answer + f"{TURN_START}assistant\n", 0.0))
    return [*pieces, (problem.solution + TURN_END, 1.0)]


def chat(problem: ToolProblem, rng: random.Random, draws: Rng, question_weight: float) -> list[Piece]:
    """A chat of one to three questions for a problem's tools, the first of which is the problem's."""
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else None
    pieces: list[Piece] = [(offer(problem, system), 0.0), *turn(problem, question_weight)]
    for _ in range(rng.choices((0, 1, 2), TURN_SHARES)[0]):
        if (more := another(draws, problem.tools)) is not None:
            pieces += [("\n", 0.0), *turn(more, question_weight)]
    return pieces


def prompt_of(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> list[int]:
    """Return the ids of a dialogue so far, in the form of the chat template."""
    text = tokenizer.apply_chat_template(
        dialogue.messages, tools=dialogue.declarations, add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: list[ToolProblem], batch: int = 50
) -> list[Dialogue]:
    """Run greedy dialogues over ``asked`` until each has an answer. Return the dialogues."""
    dialogues = [Dialogue(problem) for problem in asked]
    while waiting := [one for one in dialogues if one.text is None]:
        prompts = [prompt_of(tokenizer, one) for one in waiting]
        replies = solve_ids(model, tokenizer, prompts, batch)
        texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
        for one, text in zip(waiting, texts, strict=True):
            one.take(text, read_calls(text))
    return dialogues
