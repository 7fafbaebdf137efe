"""Convert a checkpoint with llama.cpp's converter: ``to_gguf.py SOURCES MODEL OUT.gguf [bf16]``.

The converter refuses byte-level tokenizers with an unknown splitting rule. The comparison sends token ids, so
such a tokenizer gets GPT-2's rule. The ids and the work stay the same.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    sources, model, out, *kind = sys.argv[1:]
    sys.path[:0] = [sources, str(Path(sources) / "gguf-py")]
    import conversion.base
    import convert_hf_to_gguf

    recognise = conversion.base.TextModel.get_vocab_base_pre

    def forgiving(self: conversion.base.TextModel, tokenizer: object) -> str:
        try:
            return recognise(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    conversion.base.TextModel.get_vocab_base_pre = forgiving
    # The comparison runs without drafts. Families with draft layers need the class attribute to leave the
    # layers out; all other families refuse the command-line flag.
    conversion.base.ModelBase.no_mtp = True
    form = kind[0] if kind else "bf16"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", form]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
