"""Mamba and Falcon Mamba: no attention and no feed-forward."""
