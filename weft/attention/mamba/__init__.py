"""Mamba2: the layer and the backends."""
