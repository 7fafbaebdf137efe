"""``weft plan``: a planner that watches a running server and scales its groups."""
