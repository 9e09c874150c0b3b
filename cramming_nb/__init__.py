"""Cramming, as a book that runs.

Importing the package loads neither `torch` nor `transformers`. To load an exported model with
`transformers`, import `cramming_nb.hf` (chapter 14).
"""

__version__ = "0.1.0"
