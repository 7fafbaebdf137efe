"""The ranks of a group: worker processes, supervision, and the loop of a worker."""
