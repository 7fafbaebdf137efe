"""Images of sequences: embeddings in the cache, and transfers of embeddings."""
