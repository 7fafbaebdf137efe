"""Drive the step generators of models: one alone, or two interleaved."""
