"""Drafters propose tokens that a step verifies beside its own token. Outputs do not depend on drafters."""
