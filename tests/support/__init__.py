"""Helpers for several test packages."""
