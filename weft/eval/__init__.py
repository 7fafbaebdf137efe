"""Evaluation tasks that need no download: generated problems with exact answers (torch-free)."""
