"""Policies of the scheduler: order of waiting sequences, costs, chunks and drafts."""
