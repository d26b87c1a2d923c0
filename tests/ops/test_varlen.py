"""`attention_varlen`: results and gradients of packed sequences, edges, what calls share, refusals.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops import plans
from fa_autotune.ops.kernel_plan import KernelPlan
from fa_autotune.ops.rows import packed
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import BFLOAT16, DEVICE, FLOAT16, FLOAT32, MINUS_INF, interpreted, requiring, runs_kernels
from kit.packed_calls import (
    LENGTHS,
    NAN,
    assert_packed_gradients_right,
    assert_packed_right,
    cu_seqlens,
    gradient_like,
    make_packed,
    varlen_gradients_of,
)

SLOPES = torch.tensor([0.5, 0.25, 0.06, 0.02], device=DEVICE)
SINKS = torch.tensor([0.0, 1.5, -3.0, 6.0], device=DEVICE)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3), "softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "alibi of each sequence": {"alibi_slopes": torch.rand(len(LENGTHS), 4, device=DEVICE)},
    "sinks": {"window_size": (9, -1), "sinks": SINKS},
}
UNEVEN = [(3, 9), (20, 17)]
every_call = pytest.mark.parametrize("name", CALLS)


def small(**sizes: Any) -> tuple[Tensor, ...]:
    return make_packed([(20, 24), (3, 5)], **{"heads": 2, "kv_heads": 1, "head_dim": 16, **sizes})


# --- results ----------------------------------------------------------------------------------------------------------


@runs_kernels
@every_call
def test_each_sequence_gets_what_attention_alone_would_give_it(name: str) -> None:
    assert_packed_right(make_packed(), **CALLS[name])


@runs_kernels
@pytest.mark.parametrize("name", ["causal", "window", "alibi of each sequence", "sinks"])
def test_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    arguments, factor = CALLS[name], 3.0 if "softcap" in CALLS[name] else 2.0
    assert_packed_gradients_right(make_packed(), **arguments, factor=factor)


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"),
    [(FLOAT16, 59, 59), (BFLOAT16, 24, 40), (FLOAT32, 32, 32)],
    ids=["odd", "wide values", "fp32"],
)
def test_any_dtype_and_head_dim(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    lengths = [(20, 24), (0, 2), (17, 5)]
    tensors = make_packed(lengths, heads=2, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    assert_packed_right(tensors, lengths, causal=True)
    assert_packed_gradients_right(tensors, lengths, causal=True)


@runs_kernels
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-45])
def test_any_scale(scale: float) -> None:
    tensors = small()
    assert_packed_right(tensors, [(20, 24), (3, 5)], softmax_scale=scale, causal=True)
    assert_packed_gradients_right(tensors, [(20, 24), (3, 5)], softmax_scale=scale, causal=True)


@runs_kernels
@pytest.mark.parametrize("window_size", [(-1, 0), (2**40, 0), (3, 2**31)])
def test_a_window_wider_than_positions_can_be_is_an_open_one(window_size: tuple[int, int]) -> None:
    tensors = small()
    bounded = tuple(side if side < 2**30 else -1 for side in window_size)
    found = attention_varlen(*tensors, window_size=window_size)
    assert torch.equal(found, attention_varlen(*tensors, window_size=bounded))


@runs_kernels
def test_a_document_mask_is_the_same() -> None:
    """One long sequence whose mask is block-diagonal, in plain torch."""
    documents = [7, 1, 40, 16]
    tensors = make_packed([(n, n) for n in documents], dtype=FLOAT32, kv_heads=4, head_dim=16)
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(documents)).to(DEVICE)
    place = torch.arange(sum(documents), device=DEVICE)
    visible = (document[:, None] == document) & (place <= place[:, None])
    q, k, v = (tensor.transpose(0, 1) for tensor in tensors[:3])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    found = attention_varlen(*tensors, causal=True)
    torch.testing.assert_close(found.transpose(0, 1), expected, atol=2e-6, rtol=1e-5)


@runs_kernels
def test_sequences_of_one_length_are_a_batch() -> None:
    q, k, v, *_ = make_packed([(20, 30)] * 3, dtype=FLOAT32)
    starts = cu_seqlens([20] * 3), cu_seqlens([30] * 3)
    out, lse = attention_varlen(q, k, v, *starts, causal=True, return_lse=True)
    batch = [tensor.unflatten(0, (3, -1)) for tensor in (q, k, v)]
    expected, expected_lse = attention(*batch, causal=True, return_lse=True)
    torch.testing.assert_close(out, expected.flatten(0, 1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1), atol=1e-6, rtol=1e-6)


@runs_kernels
def test_views_of_any_strides_give_the_bits_of_dense_tensors() -> None:
    q, k, v, *starts = small()
    late = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape).copy_(q)
    heads_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.stack([v, v], -1)[..., 0]
    d_out = gradient_like((q, k, v)).transpose(0, 1).contiguous().transpose(0, 1)
    expected = varlen_gradients_of((q, k, v, *starts), d_out.contiguous())
    for tensors in ((late, k, v), (q, heads_first, v), (q, k, wide)):
        torch.testing.assert_close(attention_varlen(*tensors, *starts), attention_varlen(q, k, v, *starts))
        for one, other in zip(varlen_gradients_of((*tensors, *starts), d_out), expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@runs_kernels
def test_a_sum_has_a_gradient() -> None:
    """Its own is expanded: all strides are 0."""
    tensors = small()
    inputs = requiring(*tensors[:3])
    attention_varlen(*inputs, *tensors[3:]).sum().backward()
    expected = varlen_gradients_of(tensors, torch.ones_like(tensors[0]))
    assert all(torch.equal(one.grad, other) for one, other in zip(inputs, expected, strict=True))


@runs_kernels
def test_only_what_needs_a_gradient_gets_one_and_its_bits_are_the_same() -> None:
    q, k, v, *starts = small()
    expected = varlen_gradients_of((q, k, v, *starts), gradient_like((q, k, v)), causal=True)
    for wanted in (0, 1, 2):
        inputs = [tensor.detach().requires_grad_(number == wanted) for number, tensor in enumerate((q, k, v))]
        attention_varlen(*inputs, *starts, causal=True).backward(gradient_like((q, k, v)))
        assert torch.equal(inputs[wanted].grad, expected[wanted])
        assert [tensor.grad is None for tensor in inputs].count(True) == 2


@runs_kernels
def test_a_gradient_into_lse_counts() -> None:
    q, k, v, *starts = small(dtype=FLOAT32)
    found, expected = [], []
    for backend, gradients in (("generated", found), ("reference", expected)):
        inputs = requiring(q, k, v)
        _, lse = attention_varlen(*inputs, *starts, return_lse=True, backend=backend)
        gradients += torch.autograd.grad((lse * torch.arange(lse.numel()).view_as(lse).to(lse)).sum(), inputs[:2])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@runs_kernels
def test_sinks_get_the_gradient_of_the_reference() -> None:
    found = []
    for backend in ("generated", "reference"):
        q, k, v, *starts = make_packed(unused=3, fill=NAN, dtype=FLOAT32)
        inputs = requiring(q, k, v, SINKS)
        out = attention_varlen(*inputs[:3], *starts, sinks=inputs[3], causal=True, backend=backend)
        found.append(torch.autograd.grad(out, inputs[3], gradient_like((q, k, v), 3))[0])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


# --- edges ------------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("name", ["full", "causal", "window", "sinks"])
def test_unused_rows_give_zero_and_never_leak(name: str) -> None:
    """Rows after the last sequence hold NaN, and so does their gradient; all bits are those of a clean call."""
    sizes: dict[str, Any] = {"kv_heads": 4, "head_dim": 16}
    used = [tensor.shape[0] for tensor in make_packed(UNEVEN, **sizes)[:3]]
    results = []
    for fill in (0.0, NAN):
        tensors = make_packed(UNEVEN, unused=20, fill=fill, **sizes)
        out, lse = attention_varlen(*tensors, **CALLS[name], return_lse=True)
        gradients = varlen_gradients_of(tensors, gradient_like(tensors, 20, fill), **CALLS[name])
        for value, count in zip((out, *gradients), (used[0], *used), strict=True):
            assert not value[count:].any()
            assert torch.isfinite(value).all()
        assert (lse[:, used[0] :] == MINUS_INF).all()
        results.append((out, lse, *gradients))
    assert all(map(torch.equal, *results))


@runs_kernels
@pytest.mark.parametrize("lengths", [[(0, 5), (6, 7)], [(6, 7), (0, 5)], [(5, 0), (6, 7)], [(6, 7), (5, 0)]])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (2, 1)}], ids=["full", "causal", "window"])
def test_sequences_without_rows_or_keys(lengths: list[tuple[int, int]], arguments: dict[str, Any]) -> None:
    tensors = make_packed(lengths, heads=2, kv_heads=1, head_dim=16)
    out, lse = assert_packed_right(tensors, lengths, **arguments)
    for number, (rows, keys) in enumerate(lengths):
        if rows and not keys:
            first = int(tensors[3][number])
            assert not out[first : first + rows].any()
            assert (lse[:, first : first + rows] == MINUS_INF).all()
    assert_packed_gradients_right(tensors, lengths, **arguments)


@runs_kernels
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("lengths", "unused"), [([(0, 0), (0, 0)], 0), ([(0, 0)], 5), ([], 4), ([(0, 6)], 0), ([(6, 0)], 0), ([], 0)]
)
def test_where_nothing_is_to_be_seen(lengths: list[tuple[int, int]], unused: int, sinks: bool) -> None:
    q, k, v, *starts = make_packed(lengths, unused=unused, fill=NAN)
    inputs = requiring(q, k, v, SINKS)
    out, lse = attention_varlen(*inputs[:3], *starts, causal=True, sinks=inputs[3] if sinks else None, return_lse=True)
    assert not out.any()
    used = sum(rows for rows, _ in lengths)
    assert torch.equal(lse[:, :used], SINKS[:, None].expand(-1, used) if sinks else lse.new_full((4, used), MINUS_INF))
    assert (lse[:, used:] == MINUS_INF).all()
    gradients = torch.autograd.grad(out, inputs[: 4 if sinks else 3], torch.ones_like(out))
    assert not any(gradient.any() for gradient in gradients)


@runs_kernels
def test_no_heads_give_an_empty_result() -> None:
    out, lse = attention_varlen(*small(heads=0, kv_heads=0), return_lse=True)
    assert (out.shape, lse.shape) == ((23, 0, 16), (0, 23))


@runs_kernels
def test_causal_is_bottom_right_in_every_sequence() -> None:
    """The last row of each sees all of its keys, the first one not."""
    lengths = [(2, 5), (3, 3), (4, 2)]
    q, k, v, *starts = make_packed(lengths, heads=1, kv_heads=1, head_dim=16, dtype=FLOAT32)
    v = torch.eye(16, device=DEVICE)[torch.arange(10, device=DEVICE) % 16][:, None]  # out tells which keys were seen
    seen = (attention_varlen(q, k, v, *starts, causal=True)[:, 0] > 0).tolist()
    first_keys = starts[1].tolist()
    row = 0
    for number, (rows, keys) in enumerate(lengths):
        for place in range(rows):
            expected = [first_keys[number] <= key <= first_keys[number] + place + keys - rows for key in range(16)]
            assert seen[row] == expected
            row += 1


# --- what calls share -------------------------------------------------------------------------------------------------


@runs_kernels
def test_a_maximum_of_any_kind_is_never_read(loads: list[Candidate]) -> None:
    """And loads no other kernel, nor makes another plan."""
    tensors = small()
    first = attention_varlen(*tensors, causal=True)
    for maximum in (20, 2, numpy.int64(20), torch.tensor(20), torch.tensor(7, device="meta"), None):
        assert torch.equal(attention_varlen(*tensors, maximum, maximum, causal=True), first)
    assert (len(loads), len(plans._plans)) == (1, 1)


@runs_kernels
def test_ever_new_totals_make_few_plans_and_load_nothing_new(loads: list[Candidate]) -> None:
    for count in range(1, 40):
        lengths = [(count, count + 1), (3, 2), (0, 1)]
        tensors = make_packed(lengths, heads=1, kv_heads=1, head_dim=16)
        out = attention_varlen(*tensors, causal=True)
        expected = attention_varlen(*tensors, causal=True, backend="reference")
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert len(loads) <= 2  # the tile of very short sequences, and the others'
    assert len([plan for plan in plans._plans.values() if isinstance(plan, KernelPlan)]) <= 7


@runs_kernels
def test_a_plan_made_for_one_total_serves_others_backward_too(loads: list[Candidate]) -> None:
    for count in (33, 40, 34, 50):
        lengths = [(count, 20), (5, 30)]
        assert_packed_gradients_right(make_packed(lengths, heads=2, kv_heads=1, head_dim=16), lengths)
    assert len(loads) == 4  # the forward, delta, dk and dv, dq


# --- refusals ---------------------------------------------------------------------------------------------------------


def spoiled(what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with one thing wrong."""
    q, k, v, starts_q, starts_k = small()
    calls: dict[str, Any] = {
        "2 dimensions": (q[:, 0], k, v, starts_q, starts_k),
        "4 dimensions": (q[None], k, v, starts_q, starts_k),
        "no tensor": ([1.0], k, v, starts_q, starts_k),
        "int64": (q, k, v, starts_q.long(), starts_k),
        "list": (q, k, v, starts_q.tolist(), starts_k),
        "2-d starts": (q, k, v, starts_q[None], starts_k[None]),
        "no starts": (q, k, v, starts_q[:0], starts_k[:0]),
        "every second": (q, k, v, torch.stack([starts_q, starts_q], 1)[:, 0], starts_k),
        "other count": (q, k, v, starts_q, starts_k[:-1]),
        "other device": (q, k, v, starts_q.to("meta"), starts_k),
        "totals": (q, k, v[:-1], starts_q, starts_k),
        "head_dim": (q, k[..., :8], v, starts_q, starts_k),
        "heads": (q[:, [0, 0, 0]], k[:, [0, 0]], v[:, [0, 0]], starts_q, starts_k),
        "dtype": (q, k.float(), v, starts_q, starts_k),
    }
    options: dict[str, dict[str, Any]] = {
        "slopes": {"alibi_slopes": torch.rand(3, 2, device=DEVICE)},
        "sinks": {"sinks": torch.rand(2, 2, device=DEVICE)},
        "maximum": {"max_seqlen_q": 20.0},
        "backend": {"backend": "cuda"},
        "scale": {"softmax_scale": NAN},
        "cap": {"softcap": -1.0},
        "window": {"window_size": 3},
    }
    return calls.get(what, (q, k, v, starts_q, starts_k)), options.get(what, {})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("2 dimensions", "takes 3 dimensions: total, heads, head_dim"),
        ("4 dimensions", "a batch of one length is for `attention`"),
        ("no tensor", "q is a list"),
        ("int64", r"cu_seqlens_q is torch.int64 \(3,\).*it is int32"),
        ("list", "cu_seqlens_q is a list"),
        ("2-d starts", r"it is int32 \(sequences \+ 1,\), contiguous"),
        ("no starts", r"cu_seqlens_q is torch.int32 \(0,\)"),
        ("every second", r"with stride \(2,\)"),
        ("other count", "cu_seqlens_q says 2 sequences and cu_seqlens_k 1"),
        ("other device", "cu_seqlens_q is on meta and q on"),
        ("totals", "k has 1 heads × 29 keys and v 1 × 28"),
        ("head_dim", "q has head_dim 16 and k 8"),
        ("heads", "no multiple of the 2 kv heads"),
        ("dtype", "k is torch.float32 and q torch.bfloat16"),
        ("slopes", r"alibi_slopes has shape \(3, 2\); it is \(2,\) or \(2, 2\)"),
        ("sinks", r"sinks has shape \(2, 2\); it is \(2,\)"),
        ("maximum", "max_seqlen_q=20.0 is no integer; leave it out"),
        ("backend", "backend='cuda'"),
        ("scale", "softmax_scale=nan is not finite"),
        ("cap", "softcap=-1.0 is not a positive number"),
        ("window", "window_size=3 is not"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_any_kernel(
    what: str, message: str, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KernelPlan", None)  # not to be called
    tensors, options = spoiled(what)
    with pytest.raises(InvalidProblemError, match=message):
        attention_varlen(*tensors, **options)


@runs_kernels
def test_a_call_that_shares_a_plan_is_checked_all_the_same() -> None:
    q, k, v, starts_q, starts_k = small()
    attention_varlen(q, k, v, starts_q, starts_k)
    with pytest.raises(InvalidProblemError, match="29 keys and v 1 × 28"):
        attention_varlen(q, k, v[:-1], starts_q, starts_k)
    with pytest.raises(InvalidProblemError, match="says 2 sequences and cu_seqlens_k 1"):
        attention_varlen(q, k, v, starts_q, starts_k[:-1])


def test_more_rows_than_positions_are_refused(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_TOTAL", 20)
    with pytest.raises(InvalidProblemError, match="q has 23 rows, kernels count up to 20; split the sequences"):
        attention_varlen(*small())


def test_what_this_release_does_not_serve_is_told() -> None:
    tensors = small()
    with pytest.raises(UnsupportedError, match=r"attn_mask \(a mask, of packed sequences\) is not served"):
        attention_varlen(*tensors, attn_mask=torch.ones(1, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="block_table"):
        flash_attn_varlen_func(*tensors, 20, 24, block_table=tensors[3])
    with pytest.raises(UnsupportedError, match="score_mod"):
        attention_varlen(*tensors, score_mod=lambda score: score)
    with pytest.raises(UnsupportedError, match=r"torch\.func's transforms"):
        torch.vmap(lambda q: attention_varlen(q, *tensors[1:]))(tensors[0][None])
    with pytest.raises(InvalidProblemError, match=r"qkv has shape .*; it is \(total, 3, heads, head_dim\)"):
        flash_attn_varlen_qkvpacked_func(tensors[0], tensors[3], 20)


@runs_kernels
def test_a_hook_that_changes_what_was_saved_is_told() -> None:
    inputs = requiring(*small()[:3])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[..., :8]):
        out = attention_varlen(*inputs, *small()[3:])
    with pytest.raises(InvalidProblemError, match="A hook on saved tensors must give back what it was given"):
        out.sum().backward()


@runs_kernels
def test_a_second_derivative_is_refused() -> None:
    inputs = requiring(*small()[:3])
    out = attention_varlen(*inputs, *small()[3:])
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        dq.sum().backward()


@runs_kernels
def test_autocast_casts_the_tensors() -> None:
    tensors = small(dtype=FLOAT32)
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        out = attention_varlen(*tensors)
    assert torch.equal(out, attention_varlen(*(tensor.bfloat16() for tensor in tensors[:3]), *tensors[3:]))


def test_cpu_tensors_run_the_reference_where_kernels_are_not_interpreted(
    reference_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = [tensor.cpu() for tensor in small()]
    out = attention_varlen(*tensors, causal=True)
    assert torch.equal(out, attention_varlen(*tensors, causal=True, backend="reference"))
    assert "plain torch reference" in caplog.text


# --- everything together ----------------------------------------------------------------------------------------------

lengths_of = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 45))


@st.composite
def drawn_calls(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, tuple[Tensor, ...], dict[str, Any]]:
    """Lengths, unused rows, tensors and arguments of a call."""
    lengths = draw(st.lists(st.tuples(lengths_of, lengths_of), min_size=1, max_size=5))
    unused = draw(st.sampled_from([0, 0, 1, 20]))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2))
    tensors = make_packed(
        lengths,
        unused=unused,
        fill=NAN,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 33])),
        head_dim_v=draw(st.sampled_from([16, 24])),
        dtype=draw(st.sampled_from([BFLOAT16, FLOAT16])),
    )
    sides = st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, 50))
    generator = torch.Generator().manual_seed(heads)
    arguments: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_size": (draw(sides), draw(sides)),
        "softcap": draw(st.sampled_from([0.0, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 1.0, -0.4])),
    }
    if draw(st.booleans()):
        size = draw(st.sampled_from([(heads,), (len(lengths), heads)]))
        arguments["alibi_slopes"] = torch.rand(size, generator=generator)
    if draw(st.booleans()):
        arguments["sinks"] = torch.randn(heads, generator=generator)
    return lengths, unused, tensors, arguments


@interpreted
@settings(max_examples=14, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_calls())
def test_every_combination_follows_the_numerics_rule(call: Any) -> None:
    lengths, unused, tensors, arguments = call
    clean = [tensor.nan_to_num() for tensor in tensors]
    if sum(rows for rows, _ in lengths) and sum(keys for _, keys in lengths):
        assert_packed_right(clean, lengths, unused, **arguments)
        assert_packed_gradients_right(clean, lengths, unused, factor=3.0, **arguments)
    out = attention_varlen(*tensors, **arguments)
    assert torch.equal(out, attention_varlen(*clean, **arguments))
