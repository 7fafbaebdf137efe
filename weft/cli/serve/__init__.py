"""``weft serve`` and ``weft up``: from configurations to a running server."""
