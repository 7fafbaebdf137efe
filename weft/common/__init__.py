"""What everything else may use: errors, clock, logging, environment, registries. Imports nothing of Weft."""
