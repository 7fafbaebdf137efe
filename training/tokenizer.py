"""Build the small tokenizer of the bundled models: byte-level BPE learned on generated problems.

Every digit is a separate token. All 256 bytes are in the vocabulary, so any UTF-8 text round-trips.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from weft.eval.gsm_mini import problems

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
IMAGE_START, IMAGE_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (IMAGE_START, IMAGE_END, IMAGE, VIDEO)
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

# The template shows names and arguments of tools in the form of a call. Descriptions are left out: a model of
# the size cannot use them. Without tools and calls the output equals CHAT_TEMPLATE.
TOOL_TEMPLATE = """\
{%- set begin = 0 -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set begin = 1 -%}
{{- messages[0]['content'] + '\\n' -}}
{%- endif -%}
{{- '<tools>\\n' -}}
{%- for tool in tools -%}
{%- set tool = tool['function'] if tool['function'] is defined else tool -%}
{%- set schema = tool['parameters'] if tool['parameters'] is mapping else {} -%}
{%- set properties = schema['properties'] if schema['properties'] is mapping else {} -%}
{{- '{"name": ' + tool['name'] | tojson + ', "arguments": {' -}}
{%- for name, property in properties.items() -%}
{%- set kind = property['type'] if property is mapping and property['type'] is string else 'any' -%}
{{- name | tojson + ': ' + kind | tojson + ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- '}}\\n' -}}
{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[begin:] -%}
{%- set text = message['content'] or '' -%}
{%- if message['role'] == 'tool' -%}
{{- '' if loop.previtem and loop.previtem['role'] == 'tool' else '<|im_start|>user' -}}
{{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
{{- '' if loop.nextitem and loop.nextitem['role'] == 'tool' else '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + text -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set call = call['function'] if call['function'] is defined else call -%}
{%- set arguments = call['arguments'] if call['arguments'] is string else call['arguments'] | tojson -%}
{{- '\\n' if text or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": ' + call['name'] | tojson + ', "arguments": ' + arguments -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# A content is text or a list of parts; a part without text is an image.
VISION_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- part['text'] if part['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Words with their leading space, single digits, runs of punctuation, white space: GPT-2's rule except for
# digits.
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
    """Learn ``vocab_size`` ids, special tokens first, and save a Hugging Face folder. Return the
    tokenizer.
    """
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
