"""Spans of requests over processes: writers (``spans``, ``writer``) and the reader (``merge``)."""
