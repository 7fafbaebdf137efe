"""Running models' step generators: one alone, or two interleaved."""
