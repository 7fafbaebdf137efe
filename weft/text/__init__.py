"""Text on both sides of the engine, without torch.

Tokenizer, chat template, incremental detokenizer, stop strings, and ``Choice``. ``Choice`` is the text side
of one sequence, shared by the API server and ``LLM``.
"""
