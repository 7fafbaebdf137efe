"""KV caches and image embeddings between groups: the protocol and the transports of transfers."""
