"""API server: HTTP in the forms of OpenAI, Anthropic and Ollama, typed messages to engines. No torch."""
