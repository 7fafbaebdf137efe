"""The command line and the supervisor of processes on this machine."""
