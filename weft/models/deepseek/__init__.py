"""DeepSeek V2, V3, R1 and Kimi K2: latent attention, routed experts beside shared ones."""
