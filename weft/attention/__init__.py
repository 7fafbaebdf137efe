"""Core attention: the one thing that is computed per segment. Backends behind one small interface."""
