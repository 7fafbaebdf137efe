"""``weft sim``: latency and throughput of settings on virtual time."""
