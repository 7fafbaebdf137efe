"""A KV tier in an engine process and on its ranks: commands, copies of blocks, reports."""
