"""LFM2 and LFM2-MoE: gated short convolutions and grouped-query attention."""
