"""From a request body to a stream of tokens, for every API."""
