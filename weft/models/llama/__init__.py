"""Llama 2 and 3.x."""
