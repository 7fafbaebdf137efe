"""Several models behind one server."""
