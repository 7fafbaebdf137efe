"""Builds the small tokenizer of the bundled models: byte-level BPE learned on generated problems.

Every digit is a token of its own, all 256 bytes are in the vocabulary, so any UTF-8 text round-trips.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from weft.eval.gsm_mini import problems

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TOKENIZER_SEED = 11
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You solve word problems step by step.",
    "Answer the question. Show your work and end with #### and the answer.",
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Words with their leading space, single digits, runs of punctuation, white space; GPT-2's but for the digits.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _corpus(n_problems: int) -> Iterator[str]:
    for prompt in SYSTEM_PROMPTS:
        for _ in range(n_problems // 20):
            yield f"system\n{prompt}\n"
    for problem in itertools.islice(problems("train", TOKENIZER_SEED), n_problems):
        yield f"user\n{problem.question}\nassistant\n{problem.solution}\n"
        yield f"Question: {problem.question}\nAnswer: {problem.solution}"


def build_tokenizer(
    folder: Path, vocab_size: int = 1024, n_problems: int = 40_000
) -> PreTrainedTokenizerFast:
    """Learn ``vocab_size`` ids, special tokens first, and save them as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(n_problems), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast
