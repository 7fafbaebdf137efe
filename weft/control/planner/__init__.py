"""The planner of a fleet: how many groups of each role a running server should have. Pure."""
