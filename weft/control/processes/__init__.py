"""The processes of a server and their owners: one table, one restart policy, one registry. No torch."""
