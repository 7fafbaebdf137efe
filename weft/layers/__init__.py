"""Building blocks of models: linear, norm, rotary embedding, feed-forward. Plain functions of tensors."""
