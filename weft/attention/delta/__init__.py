"""Gated delta nets: the layer and the backends."""
