"""Tasks without output tokens, read from the files of a checkpoint."""
