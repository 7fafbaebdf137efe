"""Captured steps and towers: CUDA graphs, and programs on a CPU."""
