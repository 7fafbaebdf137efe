"""Generic backend: modeling code of transformers on Weft's paged caches."""
