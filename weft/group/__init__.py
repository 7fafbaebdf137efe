"""Membership of a group as a pure state machine. ``weft.engine.group`` carries out the actions. No torch."""
