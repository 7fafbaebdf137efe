"""The Python API: ``LLM`` runs prompts to completion, ``AsyncLLM`` streams. The engine runs in the caller's
process.

The import also sets how waiting CPU threads wait. The setting has no effect if torch was imported before.
"""

from weft.common import env

env.spin_briefly()
