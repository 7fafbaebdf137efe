"""Ollama's API (``/api/...``), on the same generation path as chat completions."""
