"""A step's plan as tensors: columns, staging buffers and micro-batches."""
