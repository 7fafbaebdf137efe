"""Models: a package for each family, computation in ``model``, published names in ``weights``."""
