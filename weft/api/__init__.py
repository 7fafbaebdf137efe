"""The Python API: ``LLM`` runs prompts to their end, ``AsyncLLM`` streams; both hold an engine themselves."""
