"""Grammar backends, and the lowering of grammars to the languages of backends."""
