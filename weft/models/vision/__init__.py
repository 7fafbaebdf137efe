"""Vision towers: turn the pixels of an image into rows that replace the embeddings of its placeholder
tokens."""

from weft.models.vision.base import Embedding, Tower
from weft.models.vision.build import make_tower

__all__ = ["Embedding", "Tower", "make_tower"]
