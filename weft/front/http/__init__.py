"""HTTP parts without knowledge of a generation API: bodies, answers, access, limits, streams."""
