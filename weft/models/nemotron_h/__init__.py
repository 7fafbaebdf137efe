"""Nemotron-H and Nemotron 3: Mamba2, attention without rotation, and experts without gates."""
