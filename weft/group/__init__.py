"""Membership of a group, decided by a pure state machine; ``weft.engine.group`` carries it out. No torch."""
