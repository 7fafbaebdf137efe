"""Attention with grouped queries: the layer and the backends."""
