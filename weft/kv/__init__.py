"""Bookkeeping of the KV cache: block pools, prefix index, cache kinds, slot table. No torch, no tensors."""
