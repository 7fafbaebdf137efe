"""Control plane: decisions about engines and processes, and the links that execute decisions. No torch."""
