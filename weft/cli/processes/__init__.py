"""Entry points of the processes that a server starts."""
