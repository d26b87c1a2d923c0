"""Generated modules find Gluon's functions by the names of Triton 3.6, whatever Triton has them by."""

from types import ModuleType, SimpleNamespace

import pytest

from fa_autotune.kernels.gluon_names import give_names

OLD = {"async_copy_global_to_shared": "load", "async_copy_shared_to_global": "store", "store_wait": "wait"}
NEW = {"async_load": "load", "async_store": "store", "store_wait": "wait"}
REMOVED = {**NEW, "async_copy_global_to_shared": "raises", "async_copy_shared_to_global": "raises"}


def gluon(**functions: str) -> ModuleType:
    found = ModuleType("tma", "Gluon's.")
    vars(found).update(functions)
    return found


@pytest.mark.parametrize("functions", [OLD, NEW, {**OLD, **NEW}, REMOVED], ids=["3.6", "new only", "3.8", "3.9"])
def test_what_a_module_calls_is_there_by_its_old_name(functions: dict[str, str]) -> None:
    generated, triton = ModuleType("generated"), gluon(**functions)
    generated.tma = triton  # type: ignore[attr-defined]
    give_names(generated)
    assert {name: getattr(generated.tma, name) for name in OLD} == OLD
    assert {name: getattr(triton, name) for name in functions} == functions
    assert generated.tma.__doc__ == "Gluon's."


def test_only_modules_are_given_names() -> None:
    """A name that a module uses for something of its own stays."""
    generated = ModuleType("generated")
    generated.tma = own = SimpleNamespace(async_load="mine")  # type: ignore[attr-defined]
    give_names(generated)
    assert vars(own) == {"async_load": "mine"}
    assert generated.tma is own
