"""The kernels of one way that a call's tensors lie, and its numbers: which problem each solves, and how it is bound.

What follows from the family and the GPU is found once for all lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa_autotune.dispatch.loaded_kernels import INTERPRETER_INDEX, kernel_for
from fa_autotune.kernels.fast_launch import Launch, bind
from fa_autotune.kernels.loaded import LoadedKernel
from fa_autotune.ops.arguments import DTYPES
from fa_autotune.ops.call import NO_EXTRAS, Call, Extras
from fa_autotune.ops.memory import Allocate, access_of, allocator, is_loose
from fa_autotune.ops.rows.rows import Bounds, Rows
from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import TENSORS, Element, Pass, TensorSpec
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.estimates import WIDEST_PIECE


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where calls run: the index of a GPU (negative: the interpreter's), and what allocates memory there."""

    index: int
    dtype: torch.dtype
    allocate: Allocate


@lru_cache(maxsize=64)
def _home_of(device: torch.device, dtype: torch.dtype) -> Home:
    index = device.index if device.type == "cuda" else INTERPRETER_INDEX
    return Home(index, dtype, allocator(device))


@lru_cache(maxsize=1024)
def _family_of(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    access: Access,
    bounded_left: bool,
    bounded_right: bool,
    softcap: bool,
    tf32: bool,
    has_extras: tuple[bool, ...] | None,
    mask_dtype: torch.dtype | None,
    loose_mask: bool,
) -> AttentionFamily:
    """A forward's family; made once, since checking it costs more than a launch. `has_extras`: which are given."""
    given = Extras(*has_extras or (False,) * len(Extras._fields))  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    if mask_dtype is not None:
        kind = "bool_mask" if mask_dtype is torch.bool else "bias" if mask_dtype is dtype else "wide_bias"
        options = {kind: True, "loose_mask": loose_mask}
    return AttentionFamily(
        dtype=DTYPES[dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        access=access,
        bounded_left=bounded_left,
        bounded_right=bounded_right,
        softcap=softcap,
        alibi=bool(given.alibi_slopes),
        sinks=bool(given.sinks),
        dropout=bool(given.dropout_seed),
        varlen=bool(given.cu_seqlens_q),
        tf32=tf32 and dtype is torch.float32 and max(head_dim, head_dim_v) <= WIDEST_PIECE,
        **options,
    )


class CallKernels:
    """What a call's kernels are chosen by, and what they are told beside tensors."""

    __slots__ = ("_bounds", "call", "family", "home", "rows", "shape")

    def __init__(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> None:
        self.call = call
        self.rows = rows
        self.home = _home_of(q.device, q.dtype)
        self._bounds: Bounds = rows.bounds(call, q, k)
        self.family: AttentionFamily = self._family(q, k, v, extras)
        self.shape: AttentionShape = rows.shape(call, self._bounds, q, k, extras)

    @property
    def problem(self) -> AttentionProblem:
        """The forward's."""
        return AttentionProblem(family=self.family, shape=self.shape)

    def problem_as(self, access: Access) -> AttentionProblem:
        """The forward's, of tensors that can be read so."""
        problem = self.problem
        return problem if self.family.access is access else replace(problem, family=replace(self.family, access=access))

    def kernel_for(
        self,
        kernel_pass: Pass,
        access: Access,
        mask: Tensor | None = None,
        *,
        unordered: bool = False,
        mask_gradient: bool = False,
    ) -> LoadedKernel:
        """The kernel that dispatch chooses for a pass whose tensors can be read so; NoKernelError, CompileError.

        A saved mask may lie elsewhere by now.
        """
        problem = self.problem.for_pass(kernel_pass, unordered=unordered, mask_gradient=mask_gradient)
        family = problem.family
        if family.access is not access:
            family = replace(family, access=access)
        if mask is not None and family.has_mask and family.loose_mask is not is_loose(mask):
            family = replace(family, loose_mask=not family.loose_mask)
        if family is not problem.family:
            problem = replace(problem, family=family)
        return kernel_for(problem, self.home.index)

    def bound(
        self, kernel: LoadedKernel, tensors: Sequence[Tensor], extras: Extras, like: Launch | None = None
    ) -> Launch:
        """A kernel bound to what its pass takes and gives, as a call has it, and to the call's extras and numbers."""
        rows = self.rows
        taken = [_as_taken(rows, TENSORS[name], tensor) for name, tensor in zip(kernel.operands, tensors, strict=True)]
        taken += [rows.extra(name, getattr(extras, name)) for name in kernel.extra_tensors]
        left_diagonal, diagonal = self._bounds
        values = {
            "softmax_scale": self.family.head_dim**-0.5 if self.call.softmax_scale is None else self.call.softmax_scale,
            "diagonal": diagonal,
            "left_diagonal": left_diagonal,
            "softcap": self.call.softcap,
            "dropout_p": self.call.dropout_p,
            "key_offset": self.shape.seqlen_k - self.shape.seqlen_q,
        }
        return bind(kernel, taken, [values[name] for name in kernel.numbers], is_counted=rows.is_packed, like=like)

    def _family(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> AttentionFamily:
        call, (left_diagonal, diagonal) = self.call, self._bounds
        has_extras: tuple[bool, ...] | None = None
        mask, mask_dtype, loose = extras.attn_mask, None, False
        if extras is not NO_EXTRAS:
            has_extras = tuple(tensor is not None for tensor in extras)
            if mask is not None:
                mask_dtype, loose = mask.dtype, is_loose(mask)
        return _family_of(
            q.dtype, q.shape[-1], v.shape[-1], access_of(q, k, v), left_diagonal is not None, diagonal is not None,
            call.softcap != 0.0, call.tf32, has_extras, mask_dtype, loose,
        )  # fmt: skip


def _as_taken(rows: Rows, spec: TensorSpec, tensor: Tensor) -> Tensor:
    """A tensor as a kernel takes it."""
    if spec.element is Element.OF_CALL:
        return rows.view(tensor)
    return rows.row_numbers(tensor) if spec.columns == 1 else tensor
