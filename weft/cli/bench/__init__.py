"""``weft bench``: measurements of a server or an engine."""
