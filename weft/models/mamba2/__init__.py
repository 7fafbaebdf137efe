"""Mamba2 alone: no attention and no feed-forward."""
