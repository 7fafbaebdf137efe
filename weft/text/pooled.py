"""Embeddings in the form clients receive."""

from __future__ import annotations

import numpy as np


def normalized(embedding: bytes) -> np.ndarray:
    """Return the embedding of a ``TokenEvent`` as float32 [hidden], little-endian, with Euclidean length 1. A
    zero vector stays zero.
    """
    vector = np.frombuffer(embedding, "<f4").astype(np.float64)
    length = float(np.sqrt((vector * vector).sum()))
    return (vector / length if length else vector).astype("<f4")
