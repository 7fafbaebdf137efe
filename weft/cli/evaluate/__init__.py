"""``weft eval``: answers of a model or server to the tasks of ``weft.eval``."""
