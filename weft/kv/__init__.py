"""Bookkeeping of the KV cache: block pools, prefix index, KV cache groups, slot table. No torch, no
tensors."""
