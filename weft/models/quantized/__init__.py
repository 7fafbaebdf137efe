"""Quantized checkpoints: grouping of published tensors into weights, and dequantization.

``sources`` groups names, ``readers`` selects the format by the parts, and each format is a module of pure
functions.
"""
