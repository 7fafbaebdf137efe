"""Fixtures of the fronts' tests."""

from tests.front.conftest import script, servers, sse, start_fake, start_weft

__all__ = ["script", "servers", "sse", "start_fake", "start_weft"]
