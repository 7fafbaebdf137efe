"""Bodies of requests: one module per API, with the common mechanism in ``parse``."""
