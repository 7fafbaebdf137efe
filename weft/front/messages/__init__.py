"""POST /v1/messages: Anthropic's API, on the same generation path as chat completions."""
