"""One step on the device: staging, slot state, KV memory, forward, sample."""
