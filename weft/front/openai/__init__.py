"""The routes of OpenAI's chat completions, completions and embeddings."""
