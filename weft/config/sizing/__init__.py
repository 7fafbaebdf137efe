"""Sizes of caches in blocks and bytes, from free memory and limits."""
