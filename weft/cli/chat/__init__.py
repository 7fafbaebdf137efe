"""``weft chat``: client, conversation, drawing and keys."""
