"""Request bodies of Anthropic's Messages API, and the conversion to a conversation."""
