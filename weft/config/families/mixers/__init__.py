"""Families with state mixers: short convolutions and Mamba2."""
