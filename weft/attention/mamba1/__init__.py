"""Mamba 1: the layer and the backends."""
