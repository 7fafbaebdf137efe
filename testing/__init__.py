"""Tools for tests of the whole system. The wheel does not contain this package."""
