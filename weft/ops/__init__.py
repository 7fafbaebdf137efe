"""Tensor operations: torch references first, faster forms behind the same functions."""
