"""Qwen3 with routed experts."""
