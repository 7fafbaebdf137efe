"""The engine as a process behind a socket, and the processes of several engines."""
