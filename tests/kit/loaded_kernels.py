"""What stands for a loaded kernel where nothing is launched."""

from types import SimpleNamespace
from typing import Any

from fa_autotune.problem.family import AttentionFamily


def as_loaded(family: AttentionFamily, **more: Any) -> Any:
    """As much of a `LoadedKernel` of a family as binding reads."""
    return SimpleNamespace(
        candidate=SimpleNamespace(family=family),
        operands=(*family.kernel_pass.spec.takes, *family.outputs),
        extra_tensors=family.extra_tensors,
        numbers=family.numbers,
        **more,
    )
