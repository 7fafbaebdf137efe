"""Vision towers: from the pixels of an image to rows that stand in place of its tokens' embeddings."""

from weft.models.vision.base import Embedding, Tower
from weft.models.vision.build import make_tower

__all__ = ["Embedding", "Tower", "make_tower"]
