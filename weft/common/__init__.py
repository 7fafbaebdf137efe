"""Basics for all packages: errors, clock, logging, environment, registries. Imports nothing else of Weft."""
