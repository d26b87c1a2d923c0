"""Windows: which keys a row sees, at every edge, forward and backward; how a window reaches the kernels.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fa_autotune import attention, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from fa_autotune.dispatch.dispatcher import BackwardWay, Dispatcher
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import InvalidProblemError, NoKernelError
from fa_autotune.ops import call_kernels
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from kit.attention_calls import (
    DEVICE,
    FLOAT32,
    MINUS_INF,
    assert_gradients_right,
    assert_right,
    gradient_of,
    gradients,
    in_larger_buffers,
    interpreted,
    make,
    make_small,
    requiring,
    runs_kernels,
)
from kit.combinations import one_in
from kit.views import every_second_column, every_second_row, transposed

WINDOWS = [(0, 0), (1, 0), (36, 0), (-1, 0), (5, -1), (-1, 3), (4, 2), (20, 9), (100, 0), (100, 100)]
LENGTHS = [(37, 41), (41, 37), (5, 90), (90, 5), (1, 50), (33, 1)]


def seen(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """(seqlen_q, seqlen_k): by the definition, pair by pair."""
    left, right = window
    own = [row + seqlen_k - seqlen_q for row in range(seqlen_q)]
    visible = [
        [(left < 0 or key >= place - left) and (right < 0 or key <= place + right) for key in range(seqlen_k)]
        for place in own
    ]
    return torch.tensor(visible, device=DEVICE)


def by_definition(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    """Plain torch in fp64 with an explicit mask, for autograd; rows without a key give 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = seen(window, q.shape[2], k.shape[2])
    scores = (q @ k.transpose(-1, -2) / q.shape[3] ** 0.5).masked_fill(~visible, MINUS_INF)
    some = visible.any(-1)[:, None]
    weights = torch.softmax(torch.where(some, scores, 0.0), -1) * some
    return (weights @ v).transpose(1, 2)


# --- which keys a row sees --------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("window", [(0, 0), (1, 0), (7, 0), (-1, 0), (2, 3), (-1, 1), (1, -1)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(8, 8), (5, 8), (8, 5)])
def test_golden_masks_of_tiny_windows(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    """v is the identity, q is 0: out shows the keys that each row sees, all with one weight."""
    q, k = torch.zeros(1, seqlen_q, 1, 8, device=DEVICE), torch.ones(1, seqlen_k, 1, 8, device=DEVICE)
    v = torch.eye(seqlen_k, device=DEVICE)[None, :, None, :]
    v = torch.nn.functional.pad(v, (0, 8 - v.shape[3]))
    out = attention(q, k, v, window_size=window)[0, :, 0, :seqlen_k]
    assert torch.equal(out > 0, seen(window, seqlen_q, seqlen_k))


@runs_kernels
@pytest.mark.parametrize(("window", "lengths"), one_in(2, WINDOWS, LENGTHS))
def test_a_window_is_what_its_mask_is(window: tuple[int, int], lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    tensors = requiring(*make(seqlen_q, seqlen_k, head_dim=16, dtype=FLOAT32, batch=1))
    out, expected = attention(*tensors, window_size=window), by_definition(*tensors, window)
    d_out = gradient_of(out.shape, FLOAT32)
    found = [out, *torch.autograd.grad(out, tensors, d_out)]
    exact = [expected, *torch.autograd.grad(expected, tensors, d_out.double())]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(FLOAT32), atol=1e-5, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize("window", [(20, 0), (7, 4), (30, -1)])
def test_a_window_follows_the_numerics_rule(window: tuple[int, int]) -> None:
    assert_right(*make(150, 170), window_size=window)
    assert_gradients_right(*make_small(90, 100), window_size=window)


@runs_kernels
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (20, 50), (50, 20)])
def test_a_causal_window_is_a_window_without_keys_to_the_right(seqlen_q: int, seqlen_k: int) -> None:
    """(left, 0) and causal with left, to the bit; causal wins over a right side."""
    tensors = make_small(seqlen_q, seqlen_k)
    for left in (0, 6, 100):
        plain = gradients(*tensors, window_size=(left, 0))
        for options in ({"window_size": (left, 0)}, {"window_size": (left, -1)}, {"window_size": (left, 9)}):
            assert all(map(torch.equal, gradients(*tensors, causal=True, **options), plain))


@runs_kernels
def test_windows_that_are_open_or_reach_past_every_key_load_the_kernels_without_them(loads: list[Candidate]) -> None:
    q, k, v = make()
    plain, causal = attention(q, k, v), attention(q, k, v, causal=True)
    count = len(loads)
    for window in ((-1, -1), [-1, -1], (40, -1), (40, 36), (-5, -9)):
        assert torch.equal(attention(q, k, v, window_size=window), plain)
    for window in ((-1, 0), (40, 0), (1000, 0)):
        assert torch.equal(attention(q, k, v, window_size=window), causal)
    assert len(loads) == count == 2


@runs_kernels
def test_one_kernel_serves_windows_of_every_size(loads: list[Candidate]) -> None:
    q, k, v = make(60, 60)
    for left in range(0, 50, 7):
        assert_right(q, k, v, window_size=(left, 0))
    assert len(loads) == 1


@runs_kernels
@pytest.mark.parametrize("window", [[5, 2], numpy.array([5, 2]), (numpy.int64(5), torch.tensor(2))])
def test_sizes_of_any_integer_type_are_one_call(window: Any, loads: list[Candidate]) -> None:
    q, k, v = make()
    plain = attention(q, k, v, window_size=(5, 2))
    assert torch.equal(attention(q, k, v, window_size=window), plain)
    assert len(loads) == 1


@pytest.mark.parametrize("window", [None, 5, (1,), (1, 2, 3), (1.5, 0), ("a", 0), (None, 0)])
def test_what_is_no_window_is_an_error(window: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r"window_size=.* is not \(left, right\).* leave it out"):
        attention(*make(device=torch.device("cpu")), window_size=window)


# --- rows and keys that see nothing of each other ---------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("window", [(3, 0), (0, 2), (60, 5)])
def test_rows_whose_window_holds_no_key_give_zero_and_zero_gradients(window: tuple[int, int]) -> None:
    q, k, v = requiring(*make_small(70, 20))
    out, lse = attention(q, k, v, window_size=window, return_lse=True)
    empty = ~seen(window, 70, 20).any(-1)
    assert empty.any()
    assert (out[:, empty] == 0).all()
    assert (lse[:, :, empty] == MINUS_INF).all()
    assert torch.isfinite(lse[:, :, ~empty]).all()
    grads = torch.autograd.grad(out, (q, k, v), gradient_of(out.shape))
    assert all(torch.isfinite(gradient).all() for gradient in grads)
    assert (grads[0][:, empty] == 0).all()


@runs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("window", "first", "end"), [((9, 0), 71, 100), ((9, 5), 71, 100), ((0, -1), 80, 100)])
def test_keys_outside_of_every_window_are_never_read(
    window: tuple[int, int], first: int, end: int, poison: float
) -> None:
    """Those before the first row's window get zero gradients, and whatever they hold changes no bit."""
    q, k, v = make_small(20, 100)
    clean = (attention(q, k, v, window_size=window), *gradients(q, k, v, window_size=window))
    for tensor in (k, v):
        tensor[:, :first] = poison
    dirty = (attention(q, k, v, window_size=window), *gradients(q, k, v, window_size=window))
    assert all(map(torch.equal, clean, dirty))
    for gradient in clean[2:]:
        assert (gradient[:, :first] == 0).all()
        assert (gradient[:, first:end] != 0).any(-1).all()


@runs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_garbage_around_the_tensors_never_leaks_into_a_window(poison: float) -> None:
    q, k, v = make(head_dim=40)
    clean = attention(*in_larger_buffers(q, k, v, fill=0.0), window_size=(6, 3), return_lse=True)
    dirty = attention(*in_larger_buffers(q, k, v, fill=poison), window_size=(6, 3), return_lse=True)
    assert all(map(torch.equal, clean, dirty))


@runs_kernels
def test_nan_in_a_key_reaches_only_the_rows_whose_window_holds_it() -> None:
    q, k, v = make(40, 40)
    clean = attention(q, k, v, window_size=(3, 2))
    k[:, 20] = float("nan")
    dirty = attention(q, k, v, window_size=(3, 2))
    sees = seen((3, 2), 40, 40)[:, 20]
    assert torch.equal(clean[:, ~sees], dirty[:, ~sees])
    assert dirty[:, sees].isnan().all()


# --- tensors of all sorts ---------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("view", [transposed, every_second_row, every_second_column])
def test_strided_tensors_in_a_window(view: Any) -> None:
    tensors = [view(tensor) for tensor in make_small(50, 60)]
    assert_right(*tensors, window_size=(8, 1))
    assert_gradients_right(*tensors, window_size=(8, 1))


@runs_kernels
@pytest.mark.parametrize("head_dim", [8, 59, 96])
def test_head_dims_in_a_window(head_dim: int) -> None:
    tensors = make_small(40, 50, head_dim=head_dim)
    assert_right(*tensors, window_size=(11, 0))
    assert_gradients_right(*tensors, window_size=(11, 0))


@runs_kernels
def test_many_heads_share_keys_in_a_window() -> None:
    tensors = make_small(40, 50, heads=6, kv_heads=2)
    assert_right(*tensors, window_size=(11, 0))
    assert_gradients_right(*tensors, window_size=(11, 0))


@runs_kernels
def test_a_negative_scale_in_a_window() -> None:
    assert_right(*make(40, 50), window_size=(11, 0), softmax_scale=-0.3)


def test_without_keys_a_window_gives_zero() -> None:
    out, lse = attention(*make(5, 0, device=torch.device("cpu")), window_size=(2, 0), return_lse=True)
    assert (out == 0).all()
    assert (lse == MINUS_INF).all()


# --- the drop-in functions --------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_functions_take_a_window(causal: bool) -> None:
    q, k, v = make_small(30, 30, heads=2, kv_heads=2)
    options: dict[str, Any] = {"causal": causal, "window_size": (6, 2)}
    expected = attention(q, k, v, **options)
    assert torch.equal(flash_attn_func(q, k, v, **options), expected)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), expected)
    assert torch.equal(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options), expected)
    assert not torch.equal(expected, attention(q, k, v, causal=causal))


@runs_kernels
def test_the_gradient_of_a_packed_tensor_in_a_window_is_that_of_its_parts() -> None:
    parts = make_small(30, 30, heads=2, kv_heads=2)
    packed = torch.stack(parts, 2).requires_grad_()
    out = flash_attn_qkvpacked_func(packed, window_size=(6, 0))
    (gradient,) = torch.autograd.grad(out, packed, gradient_of(out.shape))
    assert all(map(torch.equal, gradient.unbind(2), gradients(*parts, window_size=(6, 0))))


# --- which kernels run ------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.kernel
def test_a_window_is_part_of_the_problem_that_is_dispatched(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionProblem] = []
    kernel_for = call_kernels.kernel_for
    monkeypatch.setattr(
        call_kernels, "kernel_for", lambda problem, index: asked.append(problem) or kernel_for(problem, index)
    )
    for window in ((5, 0), (5, 1), (-1, 2), (3, -1)):
        attention(*make(37, 41, batch=1), window_size=window)
    texts = ("causal,left=5", "left=5,right=1", "right=2", "left=3")
    assert asked == [AttentionProblem.parse(f"1x4x2x37x41x32,{text}") for text in texts]


def dispatcher() -> Dispatcher:
    return Dispatcher(
        device=KNOWN_DEVICES["h200"], triton_version="3.7.1", load=lambda: Snapshot(rows=()), digest_of=None
    )


@pytest.mark.parametrize(
    ("kernel_pass", "variant"),
    [(Pass.FWD, Variant.HOPPER_WS), (Pass.BWD_DKDV, Variant.TMA), (Pass.BWD_DQ, Variant.TMA)],
)
def test_kernels_for_hopper_serve_windows_as_far_as_they_know_them(kernel_pass: Pass, variant: Variant) -> None:
    problem = AttentionProblem.parse("4x32x8x4096x4096x128,causal,left=1023").for_pass(kernel_pass)
    assert dispatcher().peek(problem).candidate.variant is variant


@pytest.mark.parametrize("text", ["causal,softcap", "causal,alibi", "left=100,right=3,softcap,alibi,sinks", "sinks"])
def test_the_warp_specialised_forward_serves_every_feature(text: str) -> None:
    decision = dispatcher().peek(AttentionProblem.parse(f"4x32x8x4096x4096x128,{text}"))
    assert decision.candidate.variant is Variant.HOPPER_WS


def test_both_edges_of_a_window_spill_beside_the_widest_values() -> None:
    decision = dispatcher().peek(AttentionProblem.parse("4x8x8x4096x4096x256,causal,left=1023"))
    assert decision.candidate.variant is Variant.TMA
    assert "both edges of a window need registers that head_dim_v=256 does not leave" in decision.describe()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alibi,softcap,bwd_fused", "capped scores with ALiBi spill above head_dim 64;"),
        ("bool_mask,bwd_fused", "it knows no attn_mask;"),
        ("left=9,dropout,bwd_fused", "dropout in a window spills above head_dim 64;"),
        ("softcap,dropout,bwd_fused", "dropout of capped scores spills above head_dim 64;"),
    ],
)
def test_the_trace_says_why_a_feature_is_not_served_by_a_variant(text: str, says: str) -> None:
    problem = AttentionProblem.parse(f"4x32x8x4096x4096x128,causal,{text}")
    try:
        told = dispatcher().peek(problem).describe()
    except NoKernelError as error:
        told = str(error)
    assert f"{says} the tma and portable variants serve" in told


def test_a_window_to_the_right_alone_is_served_as_causal_is() -> None:
    decision = dispatcher().peek(AttentionProblem.parse("4x32x8x4096x4096x128,right=100"))
    assert decision.candidate.variant is Variant.HOPPER_WS


def test_the_backward_of_sinks_may_be_fused() -> None:
    choice = dispatcher().backward_choice(AttentionProblem.parse("4x32x8x4096x4096x128,causal,sinks"))
    assert choice == dispatcher().backward_choice(AttentionProblem.parse("4x32x8x4096x4096x128,causal"))
    assert choice.way is BackwardWay.FUSED


@pytest.mark.parametrize(
    "text",
    [
        *("causal,left=1023", "left=1023,right=5", "left=1023", "causal,softcap", "left=9,softcap"),
        *("causal,alibi", "left=1023,alibi", "causal,dropout", "dropout"),
    ],
)
def test_the_backward_of_features_may_be_fused(text: str) -> None:
    choice = dispatcher().backward_choice(AttentionProblem.parse(f"4x32x8x4096x4096x128,{text}"))
    assert choice.way is BackwardWay.FUSED


def test_the_backward_of_a_mask_is_split_and_says_why() -> None:
    choice = dispatcher().backward_choice(AttentionProblem.parse("4x32x8x4096x4096x128,causal,bool_mask"))
    assert choice.describe().startswith("backward split: no kernel serves bwd_fused")
    assert "it knows no attn_mask" in choice.reason
