"""Bailing hybrid: Kimi Delta Attention with bounded decays, and latent attention with gates of heads."""
