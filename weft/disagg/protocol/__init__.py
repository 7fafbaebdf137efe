"""Moving a sequence's cache from one group to another: rooms, leases, spans and digests. Pure, no torch."""
