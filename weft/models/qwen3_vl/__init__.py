"""Qwen3-VL, dense and with routed experts."""
