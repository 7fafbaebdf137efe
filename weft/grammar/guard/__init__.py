"""Grammar compilation in guarded processes, and the cache, deadlines and threads of engines."""
