"""Embeddings as clients get them."""

from __future__ import annotations

import numpy as np


def normalized(embedding: bytes) -> np.ndarray:
    """float32 [hidden], little-endian, of Euclidean length 1, of what a ``TokenEvent`` brings; zeros stay."""
    vector = np.frombuffer(embedding, "<f4").astype(np.float64)
    length = float(np.sqrt((vector * vector).sum()))
    return (vector / length if length else vector).astype("<f4")
