"""An engine process without a model. The engine plays recorded outputs."""
