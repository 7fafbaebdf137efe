"""Spans of requests over processes: their writers (``spans``, ``writer``) and their reader (``merge``)."""
