"""Moving bytes between ranks of groups: in a process, over shared memory, TCP and NIXL."""
