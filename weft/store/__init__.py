"""Files that outlive a process: the disk tier of the KV cache."""
