"""Gluon's functions under the names that generated modules call them by, which are those of Triton 3.6 and 3.7.

Triton 3.8 has some by two names, and in 3.9 the old ones only raise. A module's text, and with it the digest under
which it was measured, is the same whatever Triton it meets.
"""

from types import ModuleType

# A module of Gluon, as generated modules import it: old names of its functions, and the new ones.
_NEW_NAMES = {
    "tma": {"async_copy_global_to_shared": "async_load", "async_copy_shared_to_global": "async_store"},
    "async_copy": {"async_copy_global_to_shared": "async_load"},
}


def give_names(module: ModuleType) -> None:
    """Let a generated module find by the old names what this Triton has by new ones; Triton's own stay as they are."""
    for name, new_names in _NEW_NAMES.items():
        gluon = vars(module).get(name)
        if isinstance(gluon, ModuleType):
            found = {old: vars(gluon)[new] for old, new in new_names.items() if new in vars(gluon)}
            setattr(module, name, _copy_with(gluon, found) if found else gluon)


def _copy_with(gluon: ModuleType, functions: dict[str, object]) -> ModuleType:
    copied = ModuleType(gluon.__name__, gluon.__doc__)
    vars(copied).update(vars(gluon) | functions)
    return copied
