"""The collector of this process looks at what tests make, not at pytest and all that it imported.

Once thousands of tests are collected, a full collection goes through 800,000 objects, for half a
second, and finds nothing among them: what starts a load, plans kernels or frees a GPU's memory
asks for one each time. So those objects are set aside once. `gc.unfreeze` would bring them back,
and `gc.freeze` would keep a test's own from ever being collected, and warned of: in this process,
both only note that they were called.
"""

from __future__ import annotations

import gc

_notes = {"is_frozen": False}


def pause():
    """Collect nothing until `set_aside`: importing and collecting make much and drop little."""
    gc.disable()


def set_aside():
    """Leave out of all collections what there is now."""
    gc.collect()
    gc.freeze()
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    gc.enable()


def is_frozen() -> bool:
    """Whether `gc.freeze` was called and `gc.unfreeze` was not, since."""
    return _notes["is_frozen"]


def _freeze():
    _notes["is_frozen"] = True


def _unfreeze():
    _notes["is_frozen"] = False
