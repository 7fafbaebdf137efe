"""Stores of KV blocks that outlive a process (disk, object store), and files with new weights."""
