"""Image embeddings of a step: encoding, storage, sends and receives."""
