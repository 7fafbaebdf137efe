"""The asyncio shell of the fleet: connections to engine processes, and the flows of requests. No torch."""
