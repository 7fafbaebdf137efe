"""Granite 4: Mamba2 and grouped-query attention, dense feed-forward blocks and routed experts."""
