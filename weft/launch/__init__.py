"""The command line, and the entry points of the processes that it starts (``*_main``)."""
