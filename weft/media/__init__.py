"""Images and videos in requests: sources, sizes and pixels. The package uses no HTTP server and no tensors.

Only ``decode`` imports Pillow, and only ``video`` imports PyAV. Servers decode in worker processes (``python
-m weft.media.media_worker``).
"""
