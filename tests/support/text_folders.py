"""Write folders with a tokenizer and a template only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

TOOL_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
For each call write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if not loop.first -%}<|im_start|>system
{{ m.content }}<|im_end|>
{% endif -%}
{%- elif m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
"""Template with tools, calls and reasoning in the form of Qwen's."""
IMAGE_TEMPLATE = """\
{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
"""Template with images and videos in the form of Qwen's."""
IMAGE_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
"""Added tokens of the image model, 258 to 261 in ``write_tokenizer``. The files do not mark them as special.
"""
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added tokens of the model with tools."""


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in of each byte, to the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in table.values()]
    return {**table, **{chr(256 + n): b for n, b in enumerate(others)}}


def write_tokenizer(
    folder: Path, special: Sequence[str] = (), added: Sequence[str] = (), template: str = TEMPLATE
) -> None:
    """Write a tokenizer with one token per byte.

    Ids 0 to 255 are bytes. Then follow ``<|im_start|>``, ``<|im_end|>`` (the end of a turn), ``special``
    tokens, which text hides, and ``added`` tokens, which text shows.
    """
    made = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_small_tokenizer(folder: Path, special: Mapping[str, int], template: str) -> None:
    """Write a tokenizer with one token per character, for models with a small vocabulary.

    ``special`` maps tokens to ids. ``<|im_start|>`` and ``<|im_end|>`` have the ids 100 and 101.
    """
    named = {"<|im_start|>": 100, "<|im_end|>": 101, **special}
    characters = "Ċ" + "".join(map(chr, range(97, 123))) + "Ġ0123456789<.>"
    vocab = {character: number for number, character in enumerate(characters)}
    filler = {f"<{number}>": number for number in range(len(vocab), max(named.values()))}
    taken = set(named.values())
    vocab.update({text: number for text, number in filler.items() if number not in taken})
    made = tokenizers.Tokenizer(models.BPE(vocab={**vocab, **named}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(named))
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
