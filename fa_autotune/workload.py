"""One call of a kernel, for checks and timings: its inputs, the outputs that it writes, and its scalars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_autotune.problem import AttentionFamily, AttentionProblem, AttentionShape, Pass
from fa_autotune.reference import TORCH_DTYPES, backward_statistics, seeded_inputs, seeded_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A contiguous tensor that a kernel writes whole: (batch, heads, seqlen, columns), or without columns."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A call of a family's kernel. `inputs` are in the order in which the kernel takes them:

    q, k, v for the forward; out, do for delta; q, k, v, do, lse, delta for dk and dv, and for dq.
    """

    family: AttentionFamily
    shape: AttentionShape
    inputs: tuple[Tensor, ...]
    softmax_scale: float
    diagonal: int | None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the kernel writes, in the order in which it takes them."""
        family, shape = self.family, self.shape
        rows = (shape.batch_size, shape.num_q_heads, shape.seqlen_q)
        keys = (shape.batch_size, shape.num_kv_heads, shape.seqlen_k)
        dtype = TORCH_DTYPES[family.dtype]
        return {
            Pass.FWD: (
                Output(name="out", size=(*rows, family.head_dim_v), dtype=dtype),
                Output(name="lse", size=rows, dtype=torch.float32),
            ),
            Pass.BWD_DELTA: (Output(name="delta", size=rows, dtype=torch.float32),),
            Pass.BWD_DKDV: (
                Output(name="dk", size=(*keys, family.head_dim), dtype=dtype),
                Output(name="dv", size=(*keys, family.head_dim_v), dtype=dtype),
            ),
            Pass.BWD_DQ: (Output(name="dq", size=(*rows, family.head_dim), dtype=dtype),),
        }[family.kernel_pass]

    def allocate(self) -> tuple[Tensor, ...]:
        """Outputs with whatever memory holds."""
        device = self.inputs[0].device
        return tuple(torch.empty(output.size, dtype=output.dtype, device=device) for output in self.outputs)

    def arguments(self, outputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the kernel is called with."""
        scalars = () if self.family.kernel_pass is Pass.BWD_DELTA else (self.softmax_scale, self.diagonal)
        return (*self.inputs, *outputs, *scalars)


def bottom_right_diagonal(problem: AttentionProblem) -> int | None:
    """The diagonal by which the last row sees the last key; None where nothing is bounded."""
    return problem.shape.seqlen_k - problem.shape.seqlen_q if problem.family.bounded_right else None


def seeded_workload(
    problem: AttentionProblem,
    *,
    device: torch.device,
    diagonal: int | None,
    seed: int = 0,
    scale: float = 1.0,
) -> Workload:
    """A call with random normal inputs, q, k and v times `scale`, and the usual softmax_scale: same seed, same values.

    lse and delta are those of the call's own forward. do grows with √seqlen_k, by which the mean over as many keys
    shrinks its effect: so gradients stay of order 1, above what the numerics rule allows for rounding.
    """
    family, shape = problem.family, problem.shape
    softmax_scale = family.head_dim**-0.5
    inputs: tuple[Tensor, ...]
    if family.kernel_pass is Pass.BWD_DELTA:
        inputs = (seeded_output(family, shape, device=device, seed=seed, scale=scale),)
    else:
        inputs = seeded_inputs(family, shape, device=device, seed=seed, scale=scale)
    if family.kernel_pass is not Pass.FWD:
        other_seed = seed + 2**20
        inputs = (*inputs, seeded_output(family, shape, device=device, seed=other_seed, scale=shape.seqlen_k**0.5))
    if family.kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ):
        inputs = (*inputs, *backward_statistics(*inputs, softmax_scale=softmax_scale, diagonal=diagonal))
    return Workload(family=family, shape=shape, inputs=inputs, softmax_scale=softmax_scale, diagonal=diagonal)
