"""JSON schemas and regular expressions: checks, normal forms and rewriting."""
