"""Run the step generators of two micro-batches in turn, and decide which steps are split."""
