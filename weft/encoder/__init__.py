"""Groups that only encode images: the images of each step, and the embeddings that are sent. Pure."""
