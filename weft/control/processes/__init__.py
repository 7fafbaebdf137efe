"""Who owns which process of a server: one table, one restart policy, one registry. No torch."""
