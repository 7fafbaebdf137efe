"""The declarations of all settings: one section per subsystem. See ``all``."""
