"""POST /v1/messages: Anthropic's API over the same generation path as chat completions."""
