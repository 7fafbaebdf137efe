"""Model specs of architectures without a family, which run with the code of transformers. No torch."""
