"""Evaluation tasks without downloads: generated problems with exact answers. The package imports no torch."""
