"""Qwen3.5 text, dense and with routed experts."""
