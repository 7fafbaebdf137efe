"""API server: HTTP in OpenAI's protocol for clients, typed messages to the engine processes. No torch."""
