"""New weights for a running engine: on a rank, in a group, and for the API servers."""
