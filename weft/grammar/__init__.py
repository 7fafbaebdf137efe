"""Convert grammars to token masks. The package imports no torch: only the xgrammar backend does."""
