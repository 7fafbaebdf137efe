"""Jamba: Mamba 1 and grouped-query attention, feed-forward blocks and routed experts."""
