"""Quantized checkpoints: which published tensors make one weight, and the plain weight that they make.

``sources`` groups names, ``readers`` chooses the format by the parts, and each format is a module of pure
functions.
"""
