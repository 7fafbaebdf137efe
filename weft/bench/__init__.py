"""Load, checkpoints and workloads to measure an engine with: ``weft bench``."""
