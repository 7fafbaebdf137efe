"""POST /v1/responses: OpenAI's newer API, on the same generation path as chat completions."""
