"""Drafters propose tokens for verification by the next step. Outputs do not depend on drafters."""
