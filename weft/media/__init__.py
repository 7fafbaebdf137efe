"""Images in requests: where they come from, how large they are, and their pixels. Knows no HTTP and no
tensors.

Pillow is imported by ``decode`` alone, which runs in worker processes (``python -m weft.media.worker``).
"""
