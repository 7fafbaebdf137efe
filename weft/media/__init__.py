"""Images in requests: sources, sizes and pixels. The package uses no HTTP server and no tensors.

Only ``decode`` imports Pillow. Servers decode in worker processes (``python -m weft.media.media_worker``).
"""
