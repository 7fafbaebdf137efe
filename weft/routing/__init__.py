"""Which head gets a sequence, and what another head needs to go on with it. Sans-IO, no torch."""
