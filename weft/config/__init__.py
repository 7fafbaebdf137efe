"""Settings: one typed, frozen section for each subsystem, resolved once in named steps. No torch.

``sections`` declares the fields (a field is a flag, a keyword of ``LLM`` and a key of the YAML file),
``flags`` derives those three from the declarations, ``spec`` and ``families`` turn a checkpoint's
``config.json`` into facts, and ``resolve`` checks everything that can be checked before anything starts.
"""
