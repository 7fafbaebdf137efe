"""Settings: one typed, frozen section per subsystem, resolved once in named steps. No torch.

``sections`` declares the fields: a field is a flag, a keyword of ``LLM`` and a key of the YAML file.
``flags`` derives all three from the declarations. ``spec`` and ``families`` turn a checkpoint's
``config.json`` into a model spec. ``resolve`` runs all checks that are possible before anything starts.
"""
