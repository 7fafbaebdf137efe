"""Contents of the files of LoRA adapters: tensors, and patterns of names."""
