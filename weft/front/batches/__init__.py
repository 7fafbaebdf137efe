"""Files and batches over HTTP, beside online traffic."""
