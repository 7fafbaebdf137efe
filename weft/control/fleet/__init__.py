"""Choose an instance for each sequence, and continue sequences at other instances after a loss. Sans-IO, no
torch."""
