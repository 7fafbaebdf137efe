"""Models of declared architectures: layers and weight names follow from the traits of ``ModelSpec``."""
