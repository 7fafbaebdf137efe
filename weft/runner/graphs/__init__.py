"""Captured decode steps: CUDA graphs, and programs on a CPU."""
