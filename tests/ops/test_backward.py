"""Which way a backward takes, and what the fused way does round its kernels.

The kernels themselves are plain torch here, on what they are bound to: the shapes and strides of one call, the
addresses of a later one. A kernel that adds to its output really adds, and no memory is clean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from fa_autotune.dispatch.dispatcher import BackwardWay, Dispatcher
from fa_autotune.evaluation.workload import acc_of_dq, bottom_right_diagonal, dq_of_acc, lse_and_delta_of, statistics_of
from fa_autotune.kernels.fast_launch import Launch
from fa_autotune.ops import backward as backward_plan
from fa_autotune.ops.backward import BackwardCall, FusedBackward, SplitBackward, bind_backward
from fa_autotune.ops.memory import access_of, contiguous
from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import FUSED_BACKWARD, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import TORCH_DTYPES, attention_reference, gradients_from_statistics
from fa_autotune.space.workspace import fused_tile
from kit.winners import A100, H200, all_winners, dispatcher

NAN = float("nan")


# --- the launches -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PlainKernels:
    """Stands for the kernels of a GPU: plain torch on the memory that a launch gives."""

    dispatcher: Dispatcher
    bound: list[AttentionFamily] = field(default_factory=list)
    launched: list[Pass] = field(default_factory=list)
    dq_acc_was_zero: bool | None = None

    def bind(
        self, problem: AttentionProblem, tensors: Sequence[Tensor], *numbers: float | int | None, gpu: int | None = None
    ) -> Launch:
        """As `bound_launch.bind`: of the tensors of a launch only the addresses are read."""
        self.bound.append(problem.family)
        places = [(tensor.shape, tensor.stride()) for tensor in tensors]

        def launch(*actual: Tensor) -> None:
            views = [
                tensor.as_strided(*place, tensor.storage_offset()) for tensor, place in zip(actual, places, strict=True)
            ]
            self.launched.append(problem.family.kernel_pass)
            self._run(problem, *views, numbers=numbers)

        return launch

    def _run(self, problem: AttentionProblem, *views: Tensor, numbers: Sequence[float | int | None]) -> None:
        family, shape = problem.family, problem.shape
        scale, diagonal = numbers if numbers else (None, None)
        match family.kernel_pass:
            case Pass.BWD_DELTA:
                out, d_out, delta = views
                delta.copy_((out.float() * d_out.float()).sum(-1))
            case Pass.BWD_DKDV | Pass.BWD_DQ:
                inputs, outputs = views[:6], views[6:]
                found = gradients_from_statistics(*inputs, softmax_scale=scale, diagonal=diagonal)
                for output, gradient in zip(outputs, found[1:] if len(outputs) == 2 else found[:1], strict=True):
                    output.copy_(gradient)
            case Pass.BWD_PREPROCESS:
                out, d_out, lse, statistics, turns = views
                statistics.copy_(statistics_of(shape, lse, (out.float() * d_out.float()).sum(-1)))
                turns.zero_()
            case Pass.BWD_FUSED:
                *inputs, statistics, turns, dk, dv, dq_acc = views
                assert not turns.any()
                lse, delta = lse_and_delta_of(shape, statistics)
                dq, *others = gradients_from_statistics(*inputs, lse, delta, softmax_scale=scale, diagonal=diagonal)
                self.dq_acc_was_zero = not dq_acc.any()
                dk.copy_(others[0])
                dv.copy_(others[1])
                acc = acc_of_dq(family, self._in_tiles(family, dq / scale))
                dq_acc.copy_(dq_acc + acc if family.unordered else acc)
            case Pass.BWD_POSTPROCESS:
                dq_acc, dq = views
                dq.copy_(dq_of_acc(family, shape, dq_acc) * scale)

    def _in_tiles(self, family: AttentionFamily, dq: Tensor) -> Tensor:
        tile = fused_tile(family)
        rows, columns = -dq.shape[2] % tile.block_m, tile.columns - dq.shape[3]
        return torch.nn.functional.pad(dq.float(), (0, columns, 0, rows), value=NAN)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> PlainKernels:
    """Plain kernels in place of those of an untuned H200."""
    plain = PlainKernels(dispatcher=dispatcher())
    monkeypatch.setattr(backward_plan, "bind", plain.bind)
    monkeypatch.setattr(backward_plan, "kernel_for", lambda problem, index: problem)
    monkeypatch.setattr(backward_plan, "dispatcher_of", lambda index: plain.dispatcher)
    return plain


def poisoned(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty_strided(size, strides, dtype=dtype)
    return tensor.fill_(NAN if dtype.is_floating_point else 7)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A call on random tensors, (batch, heads, seqlen, head_dim)."""

    call: BackwardCall
    inputs: tuple[Tensor, ...]  # q, k, v, out, lse, d_out

    @property
    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Poisoned memory for dq, dk and dv."""
        q, k, v = (torch.full_like(tensor, NAN) for tensor in self.inputs[:3])
        return q, k, v

    def expected(self, d_lse: Tensor | None = None) -> tuple[Tensor, ...]:
        """The gradients in the dtype of the inputs."""
        q, k, v, out, lse, d_out = self.inputs
        delta = (out.double() * d_out.double()).sum(-1) - (0 if d_lse is None else d_lse.double())
        tensors = (tensor.double() for tensor in (q, k, v, d_out, lse, delta))
        scale, diagonal = self.call.softmax_scale, self.call.diagonal
        found = gradients_from_statistics(*tensors, softmax_scale=scale, diagonal=diagonal, dtype=torch.float64)
        return tuple(gradient.to(q.dtype) for gradient in found)


def make(text: str = "1x4x2x70x90x64,causal") -> Sample:
    problem = AttentionProblem.parse(text)
    family, shape = problem.family, problem.shape
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        torch.randn(shape.batch_size, heads, seqlen, dim, generator=generator).to(TORCH_DTYPES[family.dtype])
        for heads, seqlen, dim in (
            (shape.num_q_heads, shape.seqlen_q, family.head_dim),
            (shape.num_kv_heads, shape.seqlen_k, family.head_dim),
            (shape.num_kv_heads, shape.seqlen_k, family.head_dim_v),
            (shape.num_q_heads, shape.seqlen_q, family.head_dim_v),
        )
    )
    diagonal = bottom_right_diagonal(problem)
    out, lse = attention_reference(q, k, v, softmax_scale=0.3, diagonal=diagonal)
    call = BackwardCall(problem=problem, index=0, softmax_scale=0.3, diagonal=diagonal, allocate=poisoned)
    return Sample(call=call, inputs=(q, k, v, out.to(q.dtype), lse, d_out))


def assert_right(sample: Sample, found: Sequence[Tensor], d_lse: Tensor | None = None) -> None:
    for name, gradient, expected in zip(("dq", "dk", "dv"), found, sample.expected(d_lse), strict=True):
        torch.testing.assert_close(gradient, expected, msg=lambda text, name=name: f"{name}: {text}")


def run_fused(sample: Sample, d_lse: Tensor | None = None, *, unordered: bool = False) -> tuple[Tensor, ...]:
    backward = FusedBackward(sample.call, *sample.inputs, *sample.targets, unordered=unordered)
    found = sample.targets
    backward(*sample.inputs, d_lse, *found)
    return found


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", ["40", "64", "96", "128", "40x24", "64x96"])
@pytest.mark.parametrize("heads", ["4x4", "4x2", "3x1"])
def test_the_fused_way_gives_the_gradients(heads: str, dims: str, mask: str, kernels: PlainKernels) -> None:
    sample = make(f"2x{heads}x70x90x{dims},{mask}")
    assert_right(sample, run_fused(sample))
    assert kernels.launched == [*FUSED_BACKWARD]


@pytest.mark.parametrize("lengths", ["1x1", "128x128", "129x50", "1x300"])
def test_the_fused_way_pads_rows_to_whole_tiles(lengths: str, kernels: PlainKernels) -> None:
    sample = make(f"1x2x2x{lengths}x64")
    assert_right(sample, run_fused(sample))


@pytest.mark.parametrize("way", [BackwardWay.FUSED, BackwardWay.SPLIT])
@pytest.mark.parametrize("strides", ["dense", "expanded", "every second"])
def test_a_gradient_into_lse_is_honoured(strides: str, way: BackwardWay, kernels: PlainKernels) -> None:
    kernels.dispatcher = dispatcher(device=H200 if way is BackwardWay.FUSED else A100)
    sample = make()
    d_lse = torch.randn(1, 4, 70, generator=torch.Generator().manual_seed(1))
    d_lse = {
        "dense": d_lse,
        "expanded": d_lse[:, :1, :1].expand(d_lse.shape),
        "every second": d_lse.repeat_interleave(2, dim=2)[..., ::2],
    }[strides]
    found = sample.targets
    bind_backward(sample.call, *sample.inputs, *found, unordered=False)(*sample.inputs, d_lse, *found)
    assert_right(sample, found, d_lse)
    assert kernels.launched == [*(FUSED_BACKWARD if way is BackwardWay.FUSED else SPLIT_BACKWARD)]


@pytest.mark.parametrize("unordered", [False, True])
def test_dq_is_cleared_only_where_parts_are_added_in_any_order(unordered: bool, kernels: PlainKernels) -> None:
    sample = make()
    assert_right(sample, run_fused(sample, unordered=unordered))
    assert kernels.dq_acc_was_zero is unordered
    assert [family.unordered for family in kernels.bound] == [False, unordered, False]


def test_a_backward_runs_again_on_other_tensors(kernels: PlainKernels) -> None:
    first = make()
    backward = FusedBackward(first.call, *first.inputs, *first.targets, unordered=True)
    second = replace(first, inputs=tuple(tensor.clone() for tensor in first.inputs))
    second.inputs[5].mul_(-2)
    for sample in (first, second, first):
        found = sample.targets
        backward(*sample.inputs, None, *found)
        assert_right(sample, found)


def test_the_callers_tensors_are_never_written(kernels: PlainKernels) -> None:
    sample = make()
    d_lse = torch.ones(1, 4, 70)
    before = [tensor.clone() for tensor in sample.inputs]
    run_fused(sample, d_lse, unordered=True)
    assert all(map(torch.equal, sample.inputs, before))
    assert (d_lse == 1).all()


# --- which launches ---------------------------------------------------------------------------------------------------

NEEDED = {
    "dq dk dv": FUSED_BACKWARD,
    "dq": (Pass.BWD_DELTA, Pass.BWD_DQ),
    "dk dv": (Pass.BWD_DELTA, Pass.BWD_DKDV),
}


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("unordered", [False, True])
def test_only_what_needs_all_gradients_goes_the_fused_way(unordered: bool, needed: str, kernels: PlainKernels) -> None:
    sample = make()
    found = [
        target if name in needed else None for name, target in zip(("dq", "dk", "dv"), sample.targets, strict=True)
    ]
    backward = bind_backward(sample.call, *sample.inputs, *found, unordered=unordered)
    backward(*sample.inputs, None, *found)
    for gradient, expected in zip(found, sample.expected(), strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, expected)
    assert kernels.launched == [*NEEDED[needed]]


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize(
    ("fused_ms", "split_ms", "unordered_ms"), [(3, 4, 5), (4, 3, 5), (4, 5, 3)], ids=["fused", "split", "unordered"]
)
def test_a_call_goes_the_way_that_dispatch_names(
    fused_ms: float, split_ms: float, unordered_ms: float, unordered: bool, kernels: PlainKernels
) -> None:
    sample = make()
    problem = sample.call.problem
    rows = all_winners(problem, fused_ms=fused_ms, split_ms=split_ms, unordered_ms=unordered_ms)
    kernels.dispatcher = dispatcher(*rows)
    found = sample.targets
    bind_backward(sample.call, *sample.inputs, *found, unordered=unordered)(*sample.inputs, None, *found)
    assert_right(sample, found)
    chosen = [one.family for one in kernels.dispatcher.backward(problem, unordered=unordered)]
    assert kernels.bound == chosen
    assert kernels.launched == [family.kernel_pass for family in chosen]


@pytest.mark.parametrize("access", [Access.ALIGNED, Access.ANY])
def test_the_tensors_that_came_back_decide_and_not_those_of_the_forward(access: Access, kernels: PlainKernels) -> None:
    """A hook on saved tensors may give contiguous ones back."""
    sample = make()
    problem = replace(sample.call.problem, family=replace(sample.call.problem.family, access=access))
    call = replace(sample.call, problem=problem)
    assert isinstance(bind_backward(call, *sample.inputs, *sample.targets, unordered=False), FusedBackward)
    assert {family.access for family in kernels.bound} == {Access.TMA}


# --- where gradients are written --------------------------------------------------------------------------------------


def late(tensor: Tensor) -> Tensor:
    """Memory of that size whose address is no multiple of 16 bytes."""
    return tensor.new_full((tensor.numel() + 1,), NAN)[1:].view(tensor.shape)


def parts_of_one(sample: Sample) -> tuple[Tensor, ...]:
    """dq, dk and dv as parts of one gradient (batch, seqlen, 3, heads, head_dim)."""
    batch_size, heads, seqlen, head_dim = sample.inputs[0].shape
    whole = torch.full((batch_size, seqlen, 3, heads, head_dim), NAN, dtype=sample.inputs[0].dtype)
    return tuple(part.transpose(1, 2) for part in whole.unbind(2))


def test_gradients_are_written_into_parts_of_one_tensor(kernels: PlainKernels) -> None:
    sample = make("2x3x3x70x70x64,causal")
    found = parts_of_one(sample)
    assert not any(part.is_contiguous() for part in found)
    bind_backward(sample.call, *sample.inputs, *found, unordered=False)(*sample.inputs, None, *found)
    assert_right(sample, found)
    assert kernels.launched == [*FUSED_BACKWARD]


def test_a_later_call_may_give_its_tensors_with_other_axes(kernels: PlainKernels) -> None:
    sample = make("2x3x3x70x70x64,causal")
    found = parts_of_one(sample)
    inputs = [
        tensor if tensor.ndim == 3 else tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in sample.inputs
    ]
    backward = bind_backward(sample.call, *inputs, *found, unordered=False)
    q, k, v, out, lse, d_out, dq, dk, dv = (
        tensor if tensor.ndim == 3 else tensor.transpose(1, 2) for tensor in (*inputs, *found)
    )
    backward(q, k, v, out, lse, d_out, None, dq, dk, dv)
    assert_right(sample, found)
    assert isinstance(backward, FusedBackward)


@pytest.mark.parametrize("number", [1, 2], ids=["dk", "dv"])
def test_where_descriptors_cant_write_dk_or_dv_the_split_way_does(number: int, kernels: PlainKernels) -> None:
    sample = make()
    found = list(sample.targets)
    found[number] = late(found[number])
    bind_backward(sample.call, *sample.inputs, *found, unordered=False)(*sample.inputs, None, *found)
    assert_right(sample, found)
    assert kernels.launched == [*SPLIT_BACKWARD]


def test_dq_may_lie_anywhere_in_the_fused_way(kernels: PlainKernels) -> None:
    sample = make()
    dq, dk, dv = sample.targets
    dq = late(dq)
    bind_backward(sample.call, *sample.inputs, dq, dk, dv, unordered=False)(*sample.inputs, None, dq, dk, dv)
    assert_right(sample, (dq, dk, dv))
    assert [family.access for family in kernels.bound] == [Access.TMA, Access.TMA, Access.ANY]


@pytest.mark.parametrize("number", [0, 1, 2, 5], ids=["q", "k", "v", "do"])
@pytest.mark.parametrize("view", [late, lambda tensor: tensor[:, :1].expand(tensor.shape)], ids=["late", "expanded"])
def test_where_descriptors_cant_read_an_input_the_split_way_does(
    view: Callable[[Tensor], Tensor], number: int, kernels: PlainKernels
) -> None:
    sample = make()
    inputs = list(sample.inputs)
    inputs[number] = view(inputs[number])
    backward = bind_backward(sample.call, *inputs, *sample.targets, unordered=False)
    assert isinstance(backward, SplitBackward)
    access = access_of(inputs[number])
    assert access is not Access.TMA
    assert {family.access for family in kernels.bound if family.kernel_pass is not Pass.BWD_DELTA} == {access}


def test_an_unaligned_out_is_read_by_a_preprocessing_for_any_access(kernels: PlainKernels) -> None:
    sample = make()
    *others, out, lse, d_out = sample.inputs
    inputs = (*others, late(out).copy_(out), lse, d_out)
    found = sample.targets
    bind_backward(sample.call, *inputs, *found, unordered=False)(*inputs, None, *found)
    assert_right(sample, found)
    assert [family.access for family in kernels.bound] == [Access.ANY, Access.TMA, Access.TMA]


@pytest.mark.parametrize("size", [(), (7,), (2, 3, 5), (2, 0, 5), (0, 4), (3, 1, 1, 2)])
def test_a_contiguous_tensor_is_laid_out_as_torch_does(size: tuple[int, ...]) -> None:
    assert contiguous(size) == (size, torch.empty(size).stride())
