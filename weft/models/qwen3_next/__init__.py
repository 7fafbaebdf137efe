"""Qwen3-Next: delta nets and gated attention, routed experts."""
