"""Spans of requests: writers (``trace_spans``, ``writer``) and the reader (``merge_traces``)."""
