"""Request bodies of OpenAI's Responses API, and the conversion to a conversation."""
