"""Moving a sequence's cache from one group to another: transfers, leases, spans and digests. Pure, no
torch."""
