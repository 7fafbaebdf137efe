"""Bodies of requests: one module an API, the mechanism in ``parse``."""
