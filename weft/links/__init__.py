"""The asyncio shell of the fleet: connections to heads, and the flows of requests. No torch."""
