"""Attention to chosen positions and to compressed caches: layers and backends."""
