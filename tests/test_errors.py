"""The tree of our exceptions."""

import builtins
import re

import fa_autotune
from fa_autotune import errors


def test_every_error_class_is_exported() -> None:
    tree, frontier = set(), [fa_autotune.FaAutotuneError]
    while frontier:
        found = frontier.pop()
        tree.add(found.__name__)
        frontier += [kind for kind in found.__subclasses__() if kind.__module__ == "fa_autotune.errors"]
    assert tree <= set(fa_autotune.__all__)


def test_wrong_use_can_be_caught_as_the_builtin_that_it_refines() -> None:
    assert issubclass(fa_autotune.InvalidProblemError, ValueError)
    assert issubclass(fa_autotune.UnsupportedError, NotImplementedError)
    assert issubclass(fa_autotune.NoKernelError, LookupError)


def test_the_tree_that_the_module_draws_is_the_tree() -> None:
    drawn = re.findall(r"^ *\* (\w+)", errors.__doc__ or "", re.MULTILINE)
    defined = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    assert sorted(drawn) == sorted(defined)
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"( *)\* (\w+)(?: \((\w+)\))?", line):
            depth, name, builtin = len(found[1]) // 4, found[2], found[3]
            kind = getattr(errors, name)
            assert sum(base.__module__ == errors.__name__ for base in kind.__mro__) == depth + 1
            assert builtin is None or issubclass(kind, getattr(builtins, builtin))
