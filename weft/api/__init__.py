"""The Python API: ``LLM`` runs prompts to their end, ``AsyncLLM`` streams; both hold an engine themselves.

Importing it settles how waiting CPU threads wait, if torch was not imported before.
"""

from weft.common import env

env.spin_briefly()
