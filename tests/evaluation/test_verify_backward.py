"""The judge of backward kernels: planted faults are all caught, a right kernel passes. Kernels here are functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import SAMPLED_ROWS, Kernel, verify, verify_sampled
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.records import AccuracyReport
from fa_autotune.reference.attention import gradients_from_statistics

CPU = torch.device("cpu")
BLOCK = 16
NAN, INF = float("nan"), float("inf")
GRADIENTS = (Pass.BWD_DKDV, Pass.BWD_DQ)
OUTPUTS = [(Pass.BWD_DELTA, "delta"), (Pass.BWD_DKDV, "dk"), (Pass.BWD_DKDV, "dv"), (Pass.BWD_DQ, "dq")]
PLACES = {"delta": 2, "dk": 6, "dv": 7, "dq": 6}  # among a kernel's arguments

every_gradient = pytest.mark.parametrize("kernel_pass", GRADIENTS)
every_output = pytest.mark.parametrize(("kernel_pass", "name"), OUTPUTS)


def make_family(
    kernel_pass: Pass,
    dtype: DType = DType.BFLOAT16,
    *,
    causal: bool = True,
    access: Access = Access.TMA,
    head_dim: int = 16,
) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass, dtype=dtype, head_dim=head_dim, head_dim_v=32, bounded_right=causal, access=access
    )


def right_delta(out: Tensor, d_out: Tensor, delta: Tensor) -> None:
    delta.copy_((out.float() * d_out.float()).sum(-1))


def right_dkdv(*arguments: Any) -> None:
    """The reference, rounded once to the outputs' dtype; keys that no row sees may be NaN and are not read."""
    q, k, v, d_out, lse, delta, dk, dv, scale, diagonal = arguments
    seen = k.shape[2] if diagonal is None else max(0, min(k.shape[2], q.shape[2] + diagonal))
    found = gradients_from_statistics(
        q, k[:, :, :seen], v[:, :, :seen], d_out, lse, delta, softmax_scale=scale, diagonal=diagonal
    )
    for gradient, output in zip(found[1:], (dk, dv), strict=True):
        output.zero_()[:, :, :seen] = gradient


def right_dq(*arguments: Any) -> None:
    """As `right_dkdv`."""
    q, k, v, d_out, lse, delta, dq, scale, diagonal = arguments
    seen = k.shape[2] if diagonal is None else max(0, min(k.shape[2], q.shape[2] + diagonal))
    keys, values = k[:, :, :seen], v[:, :, :seen]
    dq.copy_(gradients_from_statistics(q, keys, values, d_out, lse, delta, softmax_scale=scale, diagonal=diagonal)[0])


RIGHT: dict[Pass, Kernel] = {Pass.BWD_DELTA: right_delta, Pass.BWD_DKDV: right_dkdv, Pass.BWD_DQ: right_dq}


def report(kernel_pass: Pass, kernel: Kernel, **family: Any) -> AccuracyReport:
    asked = make_family(kernel_pass, **family)
    return verify(kernel, asked, probes(asked, block_m=BLOCK, block_n=BLOCK, exact_lengths=False), CPU)


def reasons(kernel_pass: Pass, kernel: Kernel, **family: Any) -> str:
    return "\n".join(report(kernel_pass, kernel, **family).failures)


def spoiled(kernel_pass: Pass, name: str, fault: Callable[[Tensor], object]) -> Kernel:
    """A right kernel, one of whose outputs is spoiled."""

    def kernel(*arguments: Any) -> None:
        RIGHT[kernel_pass](*arguments)
        fault(arguments[PLACES[name]])

    return kernel


def with_changed(kernel_pass: Pass, change: Callable[[list[Any]], None]) -> Kernel:
    """A right kernel that is called with other arguments."""

    def kernel(*arguments: Any) -> None:
        changed = list(arguments)
        change(changed)
        RIGHT[kernel_pass](*changed)

    return kernel


# --- right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_lengths", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("kernel_pass", RIGHT)
def test_a_right_kernel_passes(kernel_pass: Pass, dtype: DType, causal: bool, exact_lengths: bool) -> None:
    family = make_family(kernel_pass, dtype, causal=causal)
    probe_list = probes(family, block_m=32, block_n=BLOCK, exact_lengths=exact_lengths)
    assert verify(RIGHT[kernel_pass], family, probe_list, CPU).failures == ()


@pytest.mark.parametrize("kernel_pass", RIGHT)
def test_a_right_kernel_passes_with_any_strides(kernel_pass: Pass) -> None:
    assert reasons(kernel_pass, RIGHT[kernel_pass], access=Access.ANY) == ""


@every_gradient
def test_a_right_kernel_is_well_below_what_is_allowed(kernel_pass: Pass) -> None:
    result = report(kernel_pass, RIGHT[kernel_pass])
    assert 0 < result.max_error_ratio < 0.5
    assert 0 < result.mean_error_ratio < 0.8


@every_gradient
def test_plain_torch_in_the_same_precision_passes(kernel_pass: Pass) -> None:
    """It is what the rule measures by."""

    def kernel(*arguments: Any) -> None:
        q, k, v, d_out, lse, delta, *outputs, scale, diagonal = arguments
        k, v = k.nan_to_num(), v.nan_to_num()
        found = gradients_from_statistics(
            q, k, v, d_out, lse, delta, softmax_scale=scale, diagonal=diagonal, dtype=q.dtype
        )
        for output, gradient in zip(outputs, found[1:] if kernel_pass is Pass.BWD_DKDV else found[:1], strict=True):
            output.copy_(gradient)

    assert reasons(kernel_pass, kernel) == ""


def test_grouped_bfloat16_at_head_dim_256_is_allowed_more() -> None:
    """Three times plain torch's error instead of twice: sums over the heads of a group."""

    def allowed(heads: int) -> float:
        problem = AttentionProblem.parse(f"1x4x{heads}x64x64x256,bwd_dkdv")
        workload = seeded_workload(problem, device=CPU, diagonal=None)

        def kernel(*arguments: Any) -> None:
            right_dkdv(*arguments)
            arguments[6][0, 0, 0, 0] += 100.0

        return 100.0 / verify_sampled(kernel, problem, workload.inputs, workload.softmax_scale).max_error_ratio

    assert allowed(1) / allowed(4) > 1.2


# --- faults -----------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "one value far off": (lambda gradient: gradient[0, 0, -1].add_(100.0), "error"),
    "a nan": (lambda gradient: gradient[0, -1, gradient.shape[2] // 2].fill_(NAN), "not finite"),
    "an infinity": (lambda gradient: gradient[0, 0, -1].fill_(INF), "not finite"),
    "the tail left unwritten": (lambda gradient: gradient[:, :, -1].fill_(NAN), "unwritten"),
    "everything a little larger": (lambda gradient: gradient.mul_(1.02), "error"),
    "heads swapped": (lambda gradient: gradient.copy_(gradient.flip(1)), "error"),
    "nothing at all": (lambda gradient: gradient.fill_(NAN), "unwritten"),
}


@every_output
@pytest.mark.parametrize("fault", FAULTS)
def test_catches(fault: str, kernel_pass: Pass, name: str) -> None:
    spoil, says = FAULTS[fault]
    found = reasons(kernel_pass, spoiled(kernel_pass, name, spoil))
    assert name in found
    assert says in found


@every_output
def test_a_fault_of_one_output_is_not_told_of_another(kernel_pass: Pass, name: str) -> None:
    found = report(kernel_pass, spoiled(kernel_pass, name, FAULTS["one value far off"][0])).failures
    assert found
    assert all(name in text for text in found)


@every_output
@pytest.mark.parametrize("offset", [0, -1], ids=["behind", "before"])
def test_catches_a_write_outside(kernel_pass: Pass, name: str, offset: int) -> None:
    def fault(gradient: Tensor) -> None:
        place = gradient.storage_offset() + (gradient.numel() if offset == 0 else -1)
        gradient.as_strided((1,), (1,), place).fill_(1.0)

    assert f"wrote outside of {name}" in reasons(kernel_pass, spoiled(kernel_pass, name, fault))


@every_output
def test_catches_a_last_bit_that_differs_between_two_launches(kernel_pass: Pass, name: str) -> None:
    """As atomics leave it."""
    launches = 0

    def fault(gradient: Tensor) -> None:
        nonlocal launches
        launches += 1
        if launches == 2:
            bits = gradient.view(torch.int32 if gradient.element_size() == 4 else torch.int16)
            bits[0, 0, -1] ^= 1

    found = reasons(kernel_pass, spoiled(kernel_pass, name, fault))
    assert f"two launches gave different bits in {name}" in found


@every_gradient
@pytest.mark.parametrize("by", [1, -1])
def test_catches_a_mask_off_by_one(kernel_pass: Pass, by: int) -> None:
    def change(arguments: list[Any]) -> None:
        arguments[-1] += by

    assert "error" in reasons(kernel_pass, with_changed(kernel_pass, change))


@every_gradient
def test_catches_a_diagonal_that_is_ignored(kernel_pass: Pass) -> None:
    def change(arguments: list[Any]) -> None:
        arguments[-1] = arguments[1].shape[2] - arguments[0].shape[2]

    assert "top-left" in reasons(kernel_pass, with_changed(kernel_pass, change))


@every_gradient
def test_catches_a_scale_that_is_ignored(kernel_pass: Pass) -> None:
    def change(arguments: list[Any]) -> None:
        arguments[-2] = 1.0

    assert "error" in reasons(kernel_pass, with_changed(kernel_pass, change))


@every_gradient
@pytest.mark.parametrize(("place", "name"), [(4, "lse"), (5, "delta")])
def test_catches_a_statistic_that_is_ignored(kernel_pass: Pass, place: int, name: str) -> None:
    def change(arguments: list[Any]) -> None:
        arguments[place] = torch.zeros_like(arguments[place])

    assert "error" in reasons(kernel_pass, with_changed(kernel_pass, change))


def test_catches_a_dk_of_one_head_of_each_group() -> None:
    """What is summed over the query heads that share keys must be summed over all of them."""

    def kernel(*arguments: Any) -> None:
        q, k, v, d_out, lse, delta, dk, dv, scale, diagonal = arguments
        group = q.shape[1] // k.shape[1]
        firsts = [tensor[:, ::group] for tensor in (q, d_out, lse, delta)]
        right_dkdv(firsts[0], k, v, *firsts[1:], dk, dv, scale, diagonal)

    found = reasons(Pass.BWD_DKDV, kernel)
    assert "dk error" in found
    assert "dv error" in found


@every_gradient
def test_catches_a_read_of_keys_that_no_row_sees(kernel_pass: Pass) -> None:
    """Hidden by a product with 0, which NaN survives."""

    def kernel(*arguments: Any) -> None:
        RIGHT[kernel_pass](*arguments)
        arguments[6].add_(0.0 * arguments[1][:, :, -1:].sum())

    assert "not finite" in reasons(kernel_pass, kernel)


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_catches_a_gradient_of_keys_that_no_row_sees(name: str) -> None:
    def fault(gradient: Tensor) -> None:
        gradient[gradient == 0] = 1e-30

    found = reasons(Pass.BWD_DKDV, spoiled(Pass.BWD_DKDV, name, fault))
    assert f"{name}: keys that no row sees are not exactly 0" in found


def test_catches_a_gradient_of_rows_that_see_no_key() -> None:
    def kernel(*arguments: Any) -> None:
        right_dq(*arguments)
        arguments[6][arguments[4] == -INF] = 1e-30

    assert "dq: rows that see no key are not exactly 0" in reasons(Pass.BWD_DQ, kernel)


def test_catches_a_delta_in_the_inputs_precision() -> None:
    def kernel(out: Tensor, d_out: Tensor, delta: Tensor) -> None:
        delta.copy_((out * d_out).sum(-1))

    assert "delta error" in reasons(Pass.BWD_DELTA, kernel)


# --- at a problem's own size ------------------------------------------------------------------------------------------


def sampled(
    kernel_pass: Pass, kernel: Kernel, seqlen_q: int = 40, seqlen_k: int = 50, *, causal: bool = True
) -> AccuracyReport:
    shape = AttentionShape(batch_size=2, num_q_heads=4, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    problem = AttentionProblem(family=make_family(kernel_pass, causal=causal), shape=shape)
    workload = seeded_workload(problem, device=CPU, diagonal=bottom_right_diagonal(problem))
    return verify_sampled(kernel, problem, workload.inputs, workload.softmax_scale)


class TestSampled:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("seqlen_q", "seqlen_k"), [(40, 50), (700, 30), (30, 700), (1, 300), (SAMPLED_ROWS + 1, SAMPLED_ROWS + 9)]
    )
    @pytest.mark.parametrize("kernel_pass", RIGHT)
    def test_a_right_kernel_passes(self, kernel_pass: Pass, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
        assert sampled(kernel_pass, RIGHT[kernel_pass], seqlen_q, seqlen_k, causal=causal).failures == ()

    @every_output
    @pytest.mark.parametrize("fault", FAULTS)
    def test_catches(self, fault: str, kernel_pass: Pass, name: str) -> None:
        assert name in "".join(sampled(kernel_pass, spoiled(kernel_pass, name, FAULTS[fault][0])).failures)

    @every_output
    def test_catches_a_nan_outside_of_the_samples(self, kernel_pass: Pass, name: str) -> None:
        def fault(gradient: Tensor) -> None:
            gradient[1, 1, 300] = NAN

        found = sampled(kernel_pass, spoiled(kernel_pass, name, fault), 1200, 1200, causal=False).failures
        assert found == (f"{name} was left unwritten or is not finite",)

    @every_output
    def test_catches_a_write_outside(self, kernel_pass: Pass, name: str) -> None:
        def fault(gradient: Tensor) -> None:
            place = gradient.storage_offset() + gradient.numel()
            gradient.as_strided((1,), (1,), place).fill_(1.0)

        assert f"wrote outside of {name}" in sampled(kernel_pass, spoiled(kernel_pass, name, fault)).failures

    @every_gradient
    def test_catches_a_block_of_the_loop_that_is_left_out_far_into_a_long_problem(self, kernel_pass: Pass) -> None:
        """One of eight: its share of each gradient is far below that gradient, and far above a rounding."""

        def change(arguments: list[Any]) -> None:
            cut = slice(0, 1050)
            if kernel_pass is Pass.BWD_DKDV:
                for place in (0, 3, 4, 5):
                    arguments[place] = arguments[place][:, :, cut]
            else:
                for place in (1, 2):
                    arguments[place] = arguments[place][:, :, cut]

        kernel = with_changed(kernel_pass, change)
        assert sampled(kernel_pass, kernel, 1200, 1200, causal=False).failures != ()

    @pytest.mark.parametrize("kernel_pass", GRADIENTS)
    def test_stretches_shrink_where_their_scores_would_not_fit(
        self, kernel_pass: Pass, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fa_autotune.evaluation.verify.MAX_SCORES", 300 * 2 * 20)

        def fault(gradient: Tensor) -> None:
            gradient[0, 0, 0] += 100.0

        name = "dk" if kernel_pass is Pass.BWD_DKDV else "dq"
        (failure,) = sampled(kernel_pass, spoiled(kernel_pass, name, fault), 300, 300, causal=False).failures
        assert failure.startswith(f"batch 0 head 0 rows 0…{'19' if name == 'dk' else '39'}: ")

    def test_says_where_the_error_is(self) -> None:
        def fault(gradient: Tensor) -> None:
            gradient[1, 1, 1199] += 100.0

        (failure,) = sampled(Pass.BWD_DKDV, spoiled(Pass.BWD_DKDV, "dv", fault), 20, 1200, causal=False).failures
        assert failure.startswith("batch 1 head 1 rows 944…1199: dv error ")
