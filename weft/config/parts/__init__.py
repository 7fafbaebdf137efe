"""Specs of parts of a model."""
