"""``weft verify``: compare the tokens of layouts, topologies and references."""
