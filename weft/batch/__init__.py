"""Batches of requests: files of lines that run beside online traffic, or offline, with every output once."""
