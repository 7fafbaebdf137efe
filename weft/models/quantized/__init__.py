"""Quantized checkpoints: which published tensors make one weight, and how they are dequantized to it.

``sources`` groups names, ``readers`` chooses the format by the parts, and each format is a module of pure
functions.
"""
