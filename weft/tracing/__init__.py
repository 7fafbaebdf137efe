"""Spans of requests over processes: writers (``trace_spans``, ``writer``) and the reader (``merge_traces``)."""
