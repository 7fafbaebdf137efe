"""Text on both sides of the engine: tokenizer, chat template, incremental detokenizer, stop strings, and
``Choice``, the text side of one sequence that the front and ``LLM`` share. No torch."""
