"""Vocabularies that are published in other files than tokenizer.json: each becomes one, exactly and once.

``files.read_text_files`` asks here. ``choose`` finds the file of a folder, a module for each format converts,
and ``cache`` keeps the result in the user's cache, because a conversion takes seconds.
"""
