"""Gated short convolutions: the layer and the backends."""
