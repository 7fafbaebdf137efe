"""Sampling of a step's tokens, and the parameters of sequences."""
