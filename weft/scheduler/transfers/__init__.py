"""Transfers of KV caches and image embeddings, as seen by the scheduler."""
