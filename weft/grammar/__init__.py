"""Grammars made into token masks. Imports no torch; a backend that does is loaded by the head that asks for
it.
"""
