"""Drafters: who proposes the tokens that a step verifies beside its own. No output depends on them."""
