"""The command line, and the entry points of child processes (``*_main``)."""
