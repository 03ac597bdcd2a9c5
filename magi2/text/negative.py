"""The negative prompt: the one English text that the unconditional branch is conditioned on.

The model was sampled with exactly these bytes; they are the reference's and kept as package data (see
NOTICE). No request can change them.
"""

from importlib import resources

NEGATIVE_PROMPT = (resources.files("magi2.text") / "negative_prompt.txt").read_text(encoding="utf-8")
