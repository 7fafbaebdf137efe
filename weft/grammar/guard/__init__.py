"""Grammar compilation in guarded processes, and the service for engines."""
