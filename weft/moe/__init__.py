"""Routed feed-forward blocks."""
