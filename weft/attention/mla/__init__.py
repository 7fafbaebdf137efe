"""Multi-head latent attention: the layer and the backends."""
