"""Groups that only encode images: images of each step, and embeddings to send. Pure."""
