"""Groups that only encode images: which of them a step encodes, and which embeddings leave. Pure."""
