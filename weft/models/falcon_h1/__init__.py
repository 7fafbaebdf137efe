"""Falcon-H1: Mamba2 and grouped-query attention side by side."""
