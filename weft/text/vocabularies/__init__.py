"""Conversion of vocabularies published in other files than tokenizer.json to an exact tokenizer.json.

``tokenizer_files.read_text_files`` uses this package. ``choose`` finds the vocabulary file of a folder. One
module per format converts. ``converted`` caches the result in the user's cache folder, because a conversion
takes seconds.
"""
