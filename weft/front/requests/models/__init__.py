"""Several models behind one API server, or behind several."""
