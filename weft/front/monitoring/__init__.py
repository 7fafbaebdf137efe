"""Data for operators: log lines about load and requests, the load history, and vLLM's metric names."""
