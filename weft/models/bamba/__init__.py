"""Bamba: Mamba2 and grouped-query attention, gated feed-forward blocks."""
