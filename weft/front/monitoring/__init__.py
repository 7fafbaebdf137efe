"""Lines of the log and series of metrics for operators: load, requests, and vLLM's names."""
