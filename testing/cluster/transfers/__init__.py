"""Transfers of KV caches and image embeddings in the simulated cluster."""
