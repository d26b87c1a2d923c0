"""Which way a backward takes, and what the fused way does round its kernels.

The kernels themselves are plain torch here, on what they are bound to: the shapes and strides of one call, the
addresses of a later one. A kernel that adds to its output really adds, and no memory is clean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.dispatch.dispatcher import BackwardWay, Dispatcher
from fa_autotune.errors import NoKernelError
from fa_autotune.evaluation.workload import acc_of_dq, dq_of_acc, lse_and_delta_of, statistics_of
from fa_autotune.kernels.fast_launch import Counts, Launch
from fa_autotune.ops import backward, call_kernels
from fa_autotune.ops.backward import FusedBackward, SplitBackward, Targets, backward_of
from fa_autotune.ops.call import BHSD, BOTTOM_RIGHT, BSHD, FULL, GENERATED, NO_EXTRAS, UNORDERED, Call, Saved
from fa_autotune.ops.call_kernels import CallKernels
from fa_autotune.ops.memory import access_of
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import FUSED_BACKWARD, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import TORCH_DTYPES, attention_reference, gradients_from_statistics
from fa_autotune.space.workspace import fused_tile
from kit.loaded_kernels import as_loaded
from kit.winners import A100, H200, all_winners, dispatcher

NAN = float("nan")


# --- the launches -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PlainKernels:
    """Stands for the kernels of a GPU: plain torch on the memory that a launch gives."""

    dispatcher: Dispatcher
    chosen: list[AttentionFamily] = field(default_factory=list)
    bound: list[AttentionFamily] = field(default_factory=list)
    launched: list[Pass] = field(default_factory=list)
    dq_acc_was_zero: bool | None = None

    def kernel_for(self, problem: AttentionProblem, index: int) -> Any:
        """As `loaded_kernels.kernel_for`: as much of a loaded kernel as a backward reads."""
        self.chosen.append(problem.family)
        return as_loaded(problem.family, problem=problem)

    def bind(
        self,
        kernel: Any,
        tensors: Sequence[Tensor],
        numbers: Sequence[float | int | None],
        *,
        is_counted: bool,
        like: Launch | None,
    ) -> Launch:
        """As `fast_launch.bind`: of the tensors of a launch only the addresses are read."""
        problem: AttentionProblem = kernel.problem
        self.bound.append(problem.family)
        places = [(tensor.shape, tensor.stride()) for tensor in tensors]

        def run(_self: Launch, counts: Counts | None, *actual: Tensor) -> None:
            assert counts is None
            views = [
                tensor.as_strided(*place, tensor.storage_offset()) for tensor, place in zip(actual, places, strict=True)
            ]
            self.launched.append(problem.family.kernel_pass)
            self._run(problem, *views, numbers=numbers)

        assert not is_counted
        return Launch(run)

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
    monkeypatch.setattr(call_kernels, "bind", plain.bind)
    monkeypatch.setattr(call_kernels, "kernel_for", plain.kernel_for)
    monkeypatch.setattr(backward, "dispatcher_of", lambda index: plain.dispatcher)
    return plain


def poisoned(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty_strided(size, strides, dtype=dtype)
    return tensor.fill_(NAN if dtype.is_floating_point else 7)


SCALE = 0.3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A call on random tensors, in the call's layout."""

    call: CallKernels
    saved: Saved
    d_out: Tensor

    @property
    def targets(self) -> Targets:
        """Poisoned memory for dq, dk and dv."""
        q, k, v, *_ = self.saved
        return Targets(*(torch.full_like(tensor, NAN) for tensor in (q, k, v)))

    def expected(self, d_lse: Tensor | None = None) -> tuple[Tensor, ...]:
        """The gradients (batch, heads, seqlen, head_dim) in the dtype of the inputs."""
        q, k, v, out, d_out = map(self.call.rows.view, (*self.saved[:4], self.d_out))
        delta = (out.double() * d_out.double()).sum(-1) - (0 if d_lse is None else d_lse.double())
        tensors = (tensor.double() for tensor in (q, k, v, d_out, self.saved.lse, delta))
        diagonal = k.shape[2] - q.shape[2] if self.call.call.mask == BOTTOM_RIGHT else None
        found = gradients_from_statistics(*tensors, softmax_scale=SCALE, diagonal=diagonal, dtype=torch.float64)
        return tuple(gradient.to(q.dtype) for gradient in found)

    def run(self, into: Targets, d_lse: Tensor | None = None) -> None:
        """The way that is chosen for tensors that lie so."""
        way = backward_of(self.call, self.saved, self.d_out, into)
        assert way(self.saved, self.d_out, d_lse, into, wants_sinks=False) is None


def make(text: str = "1x4x2x70x90x64,causal", *, layout: int = BHSD, runs: int = GENERATED) -> Sample:
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
    diagonal = shape.seqlen_k - shape.seqlen_q if family.bounded_right else None
    out, lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=diagonal)
    tensors = q, k, v, out.to(q.dtype), d_out
    if layout == BSHD:
        tensors = tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)
    q, k, v, out, d_out = tensors
    call = Call(SCALE, BOTTOM_RIGHT if family.bounded_right else FULL, layout, runs)
    return Sample(call=kernels_of(q, k, v, call), saved=Saved(q, k, v, out, lse), d_out=d_out)


def kernels_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> CallKernels:
    """Those of a call whose workspaces are poisoned."""
    kernels = CallKernels(rows_of(call.layout), q, k, v, NO_EXTRAS, call)
    kernels.home = replace(kernels.home, allocate=poisoned)
    return kernels


def assert_right(sample: Sample, found: Targets, d_lse: Tensor | None = None) -> None:
    """Those gradients that there are."""
    views = [one if one is None else sample.call.rows.view(one) for one in (found.q, found.k, found.v)]
    for name, gradient, expected in zip(("dq", "dk", "dv"), views, sample.expected(d_lse), strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, msg=lambda text, name=name: f"{name}: {text}")


def run_fused(sample: Sample, d_lse: Tensor | None = None, *, unordered: bool = False) -> Targets:
    found = sample.targets
    way = FusedBackward(sample.call, sample.saved, sample.d_out, found.q, unordered=unordered)
    way(sample.saved, sample.d_out, d_lse, found, wants_sinks=False)
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
    sample.run(found, d_lse)
    assert_right(sample, found, d_lse)
    assert kernels.launched == [*(FUSED_BACKWARD if way is BackwardWay.FUSED else SPLIT_BACKWARD)]


@pytest.mark.parametrize("unordered", [False, True])
def test_dq_is_cleared_only_where_parts_are_added_in_any_order(unordered: bool, kernels: PlainKernels) -> None:
    sample = make()
    assert_right(sample, run_fused(sample, unordered=unordered))
    assert kernels.dq_acc_was_zero is unordered
    assert [family.unordered for family in kernels.bound] == [False, unordered, False]


@pytest.mark.parametrize("layout", [BHSD, BSHD], ids=["bhsd", "bshd"])
def test_a_backward_runs_again_on_other_tensors(layout: int, kernels: PlainKernels) -> None:
    """Its kernels are bound by the first run, to no tensor of it."""
    first = make(layout=layout)
    targets = first.targets
    way = FusedBackward(first.call, first.saved, first.d_out, targets.q, unordered=True)
    saved = Saved(*(tensor.clone() for tensor in first.saved[:5]))
    second = replace(first, saved=saved, d_out=first.d_out * -2)
    for sample in (first, second, first):
        found = sample.targets
        way(sample.saved, sample.d_out, None, found, wants_sinks=False)
        assert_right(sample, found)
    assert len(kernels.chosen) == len(kernels.bound) == 3


def test_the_callers_tensors_are_never_written(kernels: PlainKernels) -> None:
    sample = make()
    d_lse = torch.ones(1, 4, 70)
    inputs = (*sample.saved[:5], sample.d_out)
    before = [tensor.clone() for tensor in inputs]
    run_fused(sample, d_lse, unordered=True)
    assert all(map(torch.equal, inputs, before))
    assert (d_lse == 1).all()


# --- which launches ---------------------------------------------------------------------------------------------------

NEEDED = {
    "dq dk dv": FUSED_BACKWARD,
    "dq": (Pass.BWD_DELTA, Pass.BWD_DQ),
    "dk dv": (Pass.BWD_DELTA, Pass.BWD_DKDV),
}


either_order = pytest.mark.parametrize("runs", [GENERATED, UNORDERED], ids=["ordered", "unordered"])


@pytest.mark.parametrize("needed", NEEDED)
@either_order
def test_only_what_needs_all_gradients_goes_the_fused_way(runs: int, needed: str, kernels: PlainKernels) -> None:
    sample = make(runs=runs)
    everything = sample.targets
    found = Targets(*(getattr(everything, name) if f"d{name}" in needed else None for name in "qkv"))
    sample.run(found)
    assert_right(sample, found)
    assert kernels.launched == [*NEEDED[needed]]


@either_order
@pytest.mark.parametrize(
    ("fused_ms", "split_ms", "unordered_ms"), [(3, 4, 5), (4, 3, 5), (4, 5, 3)], ids=["fused", "split", "unordered"]
)
def test_a_call_goes_the_way_that_dispatch_names(
    fused_ms: float, split_ms: float, unordered_ms: float, runs: int, kernels: PlainKernels
) -> None:
    sample = make(runs=runs)
    problem = sample.call.problem
    rows = all_winners(problem, fused_ms=fused_ms, split_ms=split_ms, unordered_ms=unordered_ms)
    kernels.dispatcher = dispatcher(*rows)
    found = sample.targets
    sample.run(found)
    assert_right(sample, found)
    chosen = [one.family for one in kernels.dispatcher.backward(problem, unordered=runs == UNORDERED)]
    assert kernels.chosen == kernels.bound == chosen
    assert kernels.launched == [family.kernel_pass for family in chosen]


def late(tensor: Tensor) -> Tensor:
    """Memory of that size whose address is no multiple of 16 bytes."""
    return tensor.new_full((tensor.numel() + 1,), NAN)[1:].view(tensor.shape)


def expanded(tensor: Tensor) -> Tensor:
    """One head for all."""
    return tensor[:, :1].expand(tensor.shape)


views = pytest.mark.parametrize(("view", "access"), [(late, Access.ANY), (expanded, Access.ALIGNED)])


@views
def test_the_tensors_that_came_back_decide_and_not_those_of_the_forward(
    view: Callable[[Tensor], Tensor], access: Access, kernels: PlainKernels
) -> None:
    """A hook on saved tensors may give contiguous ones back."""
    sample = make()
    q, k, v, *_ = sample.saved
    call = kernels_of(view(q), k, v, sample.call.call)
    assert call.family.access is access
    assert isinstance(backward_of(call, sample.saved, sample.d_out, sample.targets), FusedBackward)
    assert {family.access for family in kernels.chosen} == {Access.TMA}


# --- where gradients are written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [BHSD, BSHD], ids=["bhsd", "bshd"])
def test_gradients_are_written_into_parts_of_one_tensor(layout: int, kernels: PlainKernels) -> None:
    sample = make("2x3x3x70x70x64,causal", layout=layout)
    whole = torch.full((2, 70, 3, 3, 64), NAN, dtype=sample.d_out.dtype)
    found = Targets(*(part if layout == BSHD else part.transpose(1, 2) for part in whole.unbind(2)))
    assert not any(part.is_contiguous() for part in (found.q, found.k, found.v))
    sample.run(found)
    assert_right(sample, found)
    assert kernels.launched == [*FUSED_BACKWARD]


@pytest.mark.parametrize("name", ["k", "v"], ids=["dk", "dv"])
def test_where_descriptors_cant_write_dk_or_dv_the_split_way_does(name: str, kernels: PlainKernels) -> None:
    sample = make()
    found = sample.targets
    found = found._replace(**{name: late(getattr(found, name))})
    sample.run(found)
    assert_right(sample, found)
    assert kernels.launched == [*SPLIT_BACKWARD]


def test_dq_may_lie_anywhere_in_the_fused_way(kernels: PlainKernels) -> None:
    sample = make()
    found = sample.targets
    found = found._replace(q=late(found.q))
    sample.run(found)
    assert_right(sample, found)
    assert [family.access for family in kernels.bound] == [Access.TMA, Access.TMA, Access.ANY]


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@views
def test_where_descriptors_cant_read_an_input_the_split_way_does(
    view: Callable[[Tensor], Tensor], access: Access, name: str, kernels: PlainKernels
) -> None:
    sample = make()
    saved, d_out = sample.saved, sample.d_out
    if name == "do":
        d_out = view(d_out)
    else:
        saved = saved._replace(**{name: view(getattr(saved, name))})
    way = backward_of(sample.call, saved, d_out, sample.targets)
    assert isinstance(way, SplitBackward)
    assert access_of(d_out if name == "do" else getattr(saved, name)) is access
    assert {one.access for one in kernels.chosen if one.kernel_pass is not Pass.BWD_DELTA} == {access}


def test_an_unaligned_out_is_read_by_a_preprocessing_for_any_access(kernels: PlainKernels) -> None:
    sample = make()
    out = sample.saved.out
    sample = replace(sample, saved=sample.saved._replace(out=late(out).copy_(out)))
    found = sample.targets
    sample.run(found)
    assert_right(sample, found)
    assert [family.access for family in kernels.bound] == [Access.ANY, Access.TMA, Access.TMA]


def test_a_fused_kernel_that_is_lost_leaves_its_call_to_the_split_way(
    kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a Triton that can't compile it any more, which shows when it is loaded."""

    def kernel_for(problem: AttentionProblem, index: int) -> Any:
        if problem.family.kernel_pass is Pass.BWD_FUSED:
            raise NoKernelError("it does not compile")
        return kernels.kernel_for(problem, index)

    monkeypatch.setattr(call_kernels, "kernel_for", kernel_for)
    sample = make()
    found = sample.targets
    sample.run(found)
    assert_right(sample, found)
    assert kernels.launched == [*SPLIT_BACKWARD]
