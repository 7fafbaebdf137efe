"""Ranks of a group: mesh and collectives. One rank is a group whose collectives are no-ops."""
