"""Architectures declared as rows of a table: see ``row.py`` and ``rows.py``."""
