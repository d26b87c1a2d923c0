"""Tangents of forward-mode differentiation, which would be lost in silence: kernels know nothing of them."""

from typing import Any, NoReturn

from torch import Tensor

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.torch_private import has_tangent


def check_tangents(*values: Any) -> None:
    """UnsupportedError if a tensor among values has a tangent; callers ask `has_forward_mode` first."""
    if any(isinstance(value, Tensor) and has_tangent(value) for value in values):
        refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """For what has a tangent."""
    raise UnsupportedError(
        "attention has no forward-mode derivative (jvp, dual tensors); use reverse mode, or "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )
