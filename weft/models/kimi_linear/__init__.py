"""Kimi Linear: Kimi Delta Attention and latent attention without rotation, routed experts."""
