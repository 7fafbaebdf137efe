"""Ranks of a group: mesh and collectives. A single rank is a group with no-op collectives."""
