"""Cramming, as a book that runs.

Importing this loads nothing else; but as soon as `transformers` is there, its `Auto` classes know the model type
`cramming_nb` (chapter 14): at once if their table of configurations is loaded, else right after it was.
"""

__version__ = "0.1.0"

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

TABLE = "transformers.models.auto.configuration_auto"

def declare():
    "Tell `transformers` which configuration the model type cramming_nb has."
    from .configuration import CrammingConfig
    sys.modules[TABLE].AutoConfig.register("cramming_nb", CrammingConfig, exist_ok=True)

class Hook(MetaPathFinder):
    "Waits for the module with the table of configurations, and declares ours once it was loaded."
    def find_spec(self, name: str, path, target=None):
        if name != TABLE: return None
        sys.meta_path.remove(self)
        spec = find_spec(name)  # by the finders after this one
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), declare())
        return spec

declare() if TABLE in sys.modules else sys.meta_path.insert(0, Hook())
