"""Batches of requests: files whose lines run beside online traffic or offline, with one output per line."""
