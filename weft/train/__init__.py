"""Training with the forward pass of the engine: the same modules and ops, with gradients."""
