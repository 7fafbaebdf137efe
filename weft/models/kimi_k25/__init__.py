"""Kimi K2.5: the text model of DeepSeek V3 and MoonViT."""
