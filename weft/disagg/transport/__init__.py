"""Moving bytes between ranks of groups: in a process, over shared memory, over TCP."""
