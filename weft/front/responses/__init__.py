"""POST /v1/responses: OpenAI's newer API over the same generation path as chat completions."""
