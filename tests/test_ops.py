"""`attention` as its callers see it: results, edges, strides, errors, and what later calls cost.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import attention, calls, explain, flush_misses, launch, live_kernels, warmup
from fa_autotune.config import PortableFwdConfig
from fa_autotune.database import SessionKind, TuningDatabase
from fa_autotune.device import INTERPRETER, KNOWN_DEVICES, Toolchain
from fa_autotune.dispatch import Dispatcher
from fa_autotune.errors import FaAutotuneError, InvalidProblemError, UnsupportedError
from fa_autotune.paths import interpreting
from fa_autotune.problem import Access, AttentionProblem
from fa_autotune.records import Candidate, Variant
from fa_autotune.reference import attention_reference, attention_same_precision
from fa_autotune.snapshot import Snapshot
from fa_autotune.tensors import access_of
from tests.tuning_samples import confirmed

DEVICE = torch.device("cpu" if interpreting() else "cuda")
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MINUS_INF = float("-inf")
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture
def kernels() -> None:
    """What a test needs that runs generated kernels."""
    if not interpreting() and not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use, and kernels are not interpreted (TRITON_INTERPRET=1)")


def runs_kernels(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.kernel(pytest.mark.usefixtures("kernels")(test))


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has called nothing yet."""
    monkeypatch.setattr(calls, "_plans", {})
    for name in ("_kernels", "_dispatchers"):
        monkeypatch.setattr(live_kernels, name, {})


@pytest.fixture
def loads(cold: None, monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """The candidates loaded since the process was cold."""
    loaded: list[Candidate] = []
    load = live_kernels.load_kernel

    def counted(candidate: Candidate, *where: Any) -> launch.LoadedKernel:
        loaded.append(candidate)
        return load(candidate, *where)

    monkeypatch.setattr(live_kernels, "load_kernel", counted)
    return loaded


@pytest.fixture
def reference_only(cold: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without an interpreter, in which CPU tensors run the reference."""
    for module in (calls, live_kernels):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    calls._tell_of_reference.cache_clear()
    yield
    calls._tell_of_reference.cache_clear()


def make(
    seqlen_q: int = 37,
    seqlen_k: int = 41,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: torch.dtype = BFLOAT16,
    device: torch.device = DEVICE,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q + 1000 * seqlen_k)
    sizes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim if head_dim_v is None else head_dim_v),
    )
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return q, k, v


def swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views with heads and seqlen exchanged."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def assert_right(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Call attention, hold out and lse to the numerics rule, and give them."""
    out, lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    diagonal = k.shape[1] - q.shape[1] if causal else None
    ref, ref_lse = attention_reference(*swapped(q, k, v), softmax_scale=scale, diagonal=diagonal)
    pt = attention_same_precision(*swapped(q, k, v), softmax_scale=scale, diagonal=diagonal)
    (got,) = swapped(out)
    rounded = ref.to(q.dtype)
    roundings = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)
    error, pt_error = (got.to(ref.dtype) - ref).abs(), (pt.to(ref.dtype) - ref).abs()
    assert out.dtype == q.dtype
    assert error.max() <= 2 * pt_error.max() + roundings.max()
    assert error.mean() <= 1.5 * pt_error.mean() + roundings.mean()
    torch.testing.assert_close(lse, ref_lse, atol=1e-5, rtol=1e-5)
    return out, lse


# --- results ----------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_every_dtype_follows_the_numerics_rule(dtype: torch.dtype, causal: bool) -> None:
    assert_right(*make(dtype=dtype), causal=causal)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (2, 3), (3, 2), (5, 15), (15, 5), (17, 17), (1, 5), (1, 300), (5, 1), (130, 3), (63, 65), (65, 63)],
)
def test_lengths_below_a_block_and_off_its_multiples(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    assert_right(*make(seqlen_q, seqlen_k), causal=causal)


@runs_kernels
@causal_or_not
def test_rows_next_to_the_blocks_edge_survive_large_magnitudes(causal: bool, loads: list[Candidate]) -> None:
    q, k, v = make(200, 200)
    attention(q, k, v, causal=causal)
    block_m, block_n = loads[0].config.BLOCK_M, loads[0].config.BLOCK_N
    for seqlen_q in (block_m - 1, block_m, block_m + 1):
        for seqlen_k in (block_n - 1, block_n, block_n + 1):
            q, k, v = make(seqlen_q, seqlen_k, batch=1, heads=2)
            assert_right(q * 5, k * 3, v, causal=causal)


@runs_kernels
@pytest.mark.parametrize("magnitude", [1, 2, 4, 10])
def test_float16_scores_do_not_overflow(magnitude: int) -> None:
    q, k, v = make(dtype=FLOAT16)
    assert_right(q * magnitude, k * magnitude, v * magnitude, causal=True)


@runs_kernels
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 59, 80, 96, 111, 160, 192, 224, 255, 256])
def test_head_dims_that_are_no_power_of_two_use_all_their_columns(head_dim: int) -> None:
    q, k, v = make(20, 20, batch=1, head_dim=head_dim)
    q[..., -1], k[..., -1] = 3.0, torch.arange(20, device=DEVICE)[None, :, None] / 4  # the last column decides
    assert_right(q, k, v, causal=True)


@runs_kernels
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (32, 80), (64, 9), (8, 256)])
def test_value_columns_may_differ_from_key_columns(head_dim: int, head_dim_v: int) -> None:
    out, _ = assert_right(*make(20, 30, batch=1, head_dim=head_dim, head_dim_v=head_dim_v), causal=True)
    assert out.shape[3] == head_dim_v


@runs_kernels
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1), (5, 1), (1, 1)])
def test_query_heads_share_kv_heads_in_order(heads: int, kv_heads: int) -> None:
    q, k, v = make(heads=heads, kv_heads=kv_heads, dtype=FLOAT32)
    repeated = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (k, v))
    sdpa = F.scaled_dot_product_attention(*swapped(q, *repeated))
    torch.testing.assert_close(attention(q, k, v), *swapped(sdpa), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_float32_is_not_rounded_to_tf32() -> None:
    q, k, v = make(head_dim=64, dtype=FLOAT32)
    exact = F.scaled_dot_product_attention(*swapped(q.double(), k.double(), v.double()), enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v).double(), *swapped(exact), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_causal_of_a_square_is_what_sdpa_calls_causal() -> None:
    q, k, v = make(40, 40, kv_heads=4, dtype=FLOAT32)
    sdpa = F.scaled_dot_product_attention(*swapped(q, k, v), is_causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), *swapped(sdpa), atol=1e-5, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (1, 33), (33, 40), (39, 40)])
def test_causal_of_a_rectangle_is_bottom_right(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = make(seqlen_q, seqlen_k, kv_heads=4, dtype=FLOAT32)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE).tril(seqlen_k - seqlen_q)
    sdpa = F.scaled_dot_product_attention(*swapped(q, k, v), attn_mask=seen)
    torch.testing.assert_close(attention(q, k, v, causal=True), *swapped(sdpa), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_rows_without_a_visible_key_give_zero_not_nan() -> None:
    out, lse = attention(*make(50, 20), causal=True, return_lse=True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[:, :, 30:]).all()


@runs_kernels
def test_rows_that_meet_their_first_key_late_keep_no_nan() -> None:
    assert_right(*make(150, 20), causal=True)  # whole blocks of rows see nothing, one is mixed


@runs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [32, 59])
@causal_or_not
def test_garbage_behind_the_last_key_and_column_never_leaks(poison: float, head_dim: int, causal: bool) -> None:
    q, k, v = make(head_dim=head_dim)
    clean = attention(*in_larger_buffers(q, k, v, fill=0.0), causal=causal, return_lse=True)
    dirty = attention(*in_larger_buffers(q, k, v, fill=poison), causal=causal, return_lse=True)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


def in_larger_buffers(*tensors: Tensor, fill: float) -> list[Tensor]:
    """The same values at the start of longer and wider tensors."""
    views = []
    for tensor in tensors:
        batch, seqlen, heads, head_dim = tensor.shape
        buffer = tensor.new_full((batch, seqlen + 70, heads, head_dim + 32), fill)
        views.append(buffer[:, :seqlen, :, :head_dim].copy_(tensor))
    return views


@runs_kernels
def test_nan_in_a_key_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = make(40, 40)
    clean = attention(q, k, v, causal=True)
    k[:, 25] = float("nan")
    dirty = attention(q, k, v, causal=True)
    assert torch.equal(clean[:, :25], dirty[:, :25])
    assert dirty[:, 25:].isnan().all()


@runs_kernels
def test_rows_of_nan_give_nan_without_a_warning() -> None:
    """Tests run with warnings as errors, so one of numpy's would fail the call."""
    q, k, v = make(70, 90)
    assert attention(torch.full_like(q, float("nan")), k, v).isnan().all()


@runs_kernels
def test_two_calls_give_the_same_bits() -> None:
    q, k, v = make(70, 90)
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal=True))


@runs_kernels
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_autocast_casts_as_it_does_for_sdpa(dtype: torch.dtype) -> None:
    q, k, v = make(dtype=dtype, kv_heads=4)
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        out = attention(q, k, v)
        sdpa = F.scaled_dot_product_attention(*swapped(q, k, v))
    assert out.dtype == sdpa.dtype == BFLOAT16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


# --- lse and outputs --------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
def test_lse_is_the_natural_logarithm(causal: bool) -> None:
    q, k, v = make(30, 40, kv_heads=4, dtype=FLOAT32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 32**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(30, 40, dtype=torch.bool, device=DEVICE).tril(10), MINUS_INF)
    _, lse = attention(q, k, v, causal=causal, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1).float(), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_parts_merge_to_the_whole_by_their_lse() -> None:
    q, k, v = make(20, 60, dtype=FLOAT32)
    whole = attention(q, k, v)
    parts = [attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 25), slice(25, 60))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).transpose(2, 3)[..., None]
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)


@runs_kernels
def test_bhsd_is_the_same_call_with_axes_exchanged() -> None:
    q, k, v = make()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    other, other_lse = attention(*swapped(q, k, v), causal=True, return_lse=True, layout="bhsd")
    assert torch.equal(*swapped(other), out)
    assert torch.equal(other_lse, lse)


@runs_kernels
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_outputs_are_contiguous_in_the_callers_layout(layout: str) -> None:
    q, k, v = make(head_dim_v=48)
    tensors = (q, k, v) if layout == "bshd" else swapped(q, k, v)
    out, lse = attention(*tensors, return_lse=True, layout=layout)
    assert (out.shape, out.is_contiguous()) == ((*tensors[0].shape[:3], 48), True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 37), FLOAT32, True)


@runs_kernels
@pytest.mark.parametrize("softmax_scale", [None, -0.5, 0.0])
def test_the_callers_tensors_are_never_written(softmax_scale: float | None) -> None:
    tensors = make()
    before = [tensor.clone() for tensor in tensors]
    attention(*tensors, causal=True, softmax_scale=softmax_scale)
    assert all(map(torch.equal, tensors, before))


# --- scale ------------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("softmax_scale", [1.0, 0.03, 0.0, -0.2, 1e-46, -1e-46, 1e-30])
def test_any_finite_scale_works(softmax_scale: float, causal: bool) -> None:
    assert_right(*make(41, 37), softmax_scale=softmax_scale, causal=causal)


@runs_kernels
@pytest.mark.parametrize("scale", [numpy.float32(0.5), numpy.float64(0.5), numpy.int64(1), 1, torch.tensor(0.5)])
def test_a_scale_of_any_number_type_runs_the_same_kernel(scale: Any, loads: list[Candidate]) -> None:
    q, k, v = make()
    plain = attention(q, k, v, softmax_scale=float(scale))
    assert torch.equal(attention(q, k, v, softmax_scale=scale), plain)
    assert len(loads) == 1


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_scale_that_is_not_finite_is_an_error(scale: float) -> None:
    with pytest.raises(InvalidProblemError, match=r"softmax_scale=\S+ is not finite.* None means"):
        attention(*make(device=torch.device("cpu")), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["large", 1j, torch.ones(2), 10**400], ids=["text", "complex", "two", "huge"])
def test_a_scale_that_is_no_number_is_an_error(scale: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r"softmax_scale=.* is not a number; None means"):
        attention(*make(device=torch.device("cpu")), softmax_scale=scale)


@runs_kernels
@pytest.mark.parametrize("truth", [1, numpy.int64(1), numpy.bool_(True), torch.tensor(True)])
def test_causal_may_be_any_truth_value(truth: Any, loads: list[Candidate]) -> None:
    q, k, v = make()
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal=truth))
    assert len(loads) == 1


# --- strides ----------------------------------------------------------------------------------------------------------


def fused(tensor: Tensor) -> Tensor:
    """As the middle part of one fused projection."""
    return torch.cat([tensor, tensor, tensor], dim=2).split(tensor.shape[2], dim=2)[1]


def transposed(tensor: Tensor) -> Tensor:
    """Stored with heads before seqlen."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def every_second_row(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=1)[:, ::2]


def every_second_column(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=3)[..., ::2]


def lazily_negated(tensor: Tensor) -> Tensor:
    """As real parts of conjugated tensors are: memory holds the opposite sign."""
    return torch._neg_view(-tensor)


def columns_first(tensor: Tensor) -> Tensor:
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def one_element_late(tensor: Tensor) -> Tensor:
    """A storage offset that is no multiple of 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def odd_rows(tensor: Tensor) -> Tensor:
    """Rows that are one element longer than their columns."""
    return F.pad(tensor, (0, 1))[..., :-1]


VIEWS = (
    fused,
    transposed,
    every_second_row,
    every_second_column,
    lazily_negated,
    columns_first,
    one_element_late,
    odd_rows,
)


@runs_kernels
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_tensor_gives_the_values_of_its_copy(view: Callable[[Tensor], Tensor], which: str) -> None:
    q, k, v = make(kv_heads=4)
    q, k, v = (view(tensor) if name in which else tensor for name, tensor in zip("qkv", (q, k, v), strict=True))
    assert_right(q, k, v, causal=True)


@runs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_expanded_keys_and_values_are_read_with_stride_zero(dim: int) -> None:
    q, k, v = make(kv_heads=4)
    k, v = (tensor.narrow(dim, 0, 1).expand(tensor.shape) for tensor in (k, v))
    assert_right(q, k, v, causal=True)


@runs_kernels
def test_real_strides_after_expanded_ones_of_the_same_shape() -> None:
    q, k, v = make()
    attention(q, k[:1].expand(k.shape), v[:1].expand(v.shape))
    assert_right(q, k, v)


@runs_kernels
def test_unaligned_tensors_after_aligned_ones_of_the_same_shape() -> None:
    q, k, v = make()
    aligned = attention(q, k, v)
    assert_right(one_element_late(q), one_element_late(k), one_element_late(v))
    assert torch.equal(attention(q, k, v), aligned)


@runs_kernels
def test_a_dimension_of_one_may_have_any_stride() -> None:
    q, k, v = make(20, 30, batch=1, heads=1, kv_heads=1)
    odd = [tensor.as_strided(tensor.shape, (3, tensor.stride(1), 5, 1)) for tensor in (q, k, v)]
    assert_right(*odd, causal=True)


@runs_kernels
def test_q_k_and_v_may_be_one_tensor() -> None:
    q, _, _ = make()
    assert_right(q, q, q, causal=True)


# In (batch, heads, seqlen, head_dim) order: 2 bytes an element, so 8 elements are 16 bytes.
SHAPE = (2, 3, 5, 32)


def strided(*strides: int, offset: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.zeros(20_000, dtype=BFLOAT16).as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("tensor", "access"),
    [
        (torch.zeros(SHAPE, dtype=BFLOAT16), Access.TMA),
        (strided(480, 32, 96, 1), Access.TMA),  # bshd
        (strided(480, 160, 40, 1), Access.TMA),  # rows of 80 bytes
        (strided(480, 160, 32, 1, offset=8), Access.TMA),
        (strided(0, 160, 32, 1), Access.ALIGNED),
        (strided(480, 0, 32, 1), Access.ALIGNED),
        (strided(480, 160, 0, 1), Access.ALIGNED),
        (strided(480, 160, 32, 1, offset=1), Access.ANY),
        (strided(480, 160, 32, 1, offset=4), Access.ANY),
        (strided(480, 160, 33, 1), Access.ANY),
        (strided(484, 160, 32, 1), Access.ANY),
        (strided(960, 320, 64, 2), Access.ANY),
        (strided(480, 160, 1, 5), Access.ANY),
        (strided(480, 160, 32, 0), Access.ANY),
        (strided(480, 160, 32, 1, shape=(2, 3, 5, 30)), Access.ANY),  # rows of 60 bytes
        (torch.zeros(2, 3, 5, 36, dtype=FLOAT32), Access.TMA),
        (torch.zeros(2, 3, 5, 34, dtype=FLOAT32), Access.ANY),
    ],
    ids=lambda value: str(value.stride()) if isinstance(value, Tensor) else value.value,
)
def test_access_follows_pointers_and_strides(tensor: Tensor, access: Access) -> None:
    assert access_of(tensor) is access


def test_the_weakest_tensor_decides_the_access() -> None:
    tma, aligned, anyhow = torch.zeros(SHAPE, dtype=BFLOAT16), strided(0, 160, 32, 1), strided(480, 160, 33, 1)
    assert access_of(tma, aligned, tma) is Access.ALIGNED
    assert access_of(tma, aligned, anyhow) is Access.ANY


# --- nothing to do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"heads": 0, "kv_heads": 0}, {"heads": 0}],
    ids=lambda sizes: "-".join(sizes),
)
def test_empty_queries_give_empty_results(sizes: dict[str, int]) -> None:
    q, k, v = make(**sizes, head_dim_v=48, device=torch.device("cpu"))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (*q.shape[:3], 48)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])


@causal_or_not
def test_without_keys_every_row_is_zero(causal: bool) -> None:
    out, lse = attention(*make(5, 0, device=torch.device("cpu")), causal=causal, return_lse=True)
    assert (out == 0).all()
    assert (lse == MINUS_INF).all()


def test_an_empty_call_is_checked_like_any_other() -> None:
    q, k, v = make(batch=0, device=torch.device("cpu"))
    with pytest.raises(InvalidProblemError, match="head_dim"):
        attention(q, k[..., :16], v)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_size", (128, 0)),
        ("window_size", (-1, 0)),
        ("window_size", None),
        ("softcap", 30.0),
        ("alibi_slopes", torch.ones(4)),
        ("attn_mask", torch.ones(37, 41, dtype=torch.bool)),
        ("sinks", torch.ones(4)),
        ("dropout_p", 0.1),
        ("score_mod", lambda score: score),
        ("mask_mod", lambda row: True),
        ("q_scale", torch.ones(1)),
        ("k_scale", torch.ones(1)),
        ("v_scale", torch.ones(1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_that_is_not_served_is_named(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} \(.*leave it out"):
        attention(*make(device=torch.device("cpu")), **{name: value})


@runs_kernels
def test_arguments_that_mean_off_are_served() -> None:
    q, k, v = make()
    off: dict[str, Any] = {"window_size": [-1, -1], "softcap": 0, "dropout_p": 0, "deterministic": False}
    assert torch.equal(attention(q, k, v, **off), attention(q, k, v))


def changed(**changes: Callable[[Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    def build() -> list[Tensor]:
        tensors = dict(zip("qkv", make(device=torch.device("cpu")), strict=True))
        return [changes.get(name, lambda same: same)(tensor) for name, tensor in tensors.items()]

    return build


def sized(**sizes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: make(**sizes, device=torch.device("cpu"))  # type: ignore[arg-type]


BAD_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "q of 3 dimensions": (changed(q=lambda t: t[0]), r"q has shape \(37, 4, 32\), attention takes 4.* unsqueeze"),
    "k of 2 dimensions": (changed(k=lambda t: t[0, 0]), r"k has shape \(2, 32\), attention takes 4"),
    "v of 5 dimensions": (changed(v=lambda t: t[None]), r"v has shape \(1, 2, 41, 2, 32\), attention takes 4"),
    "v of no dimension": (changed(v=lambda t: t.sum()), r"v has shape \(\), attention takes 4"),
    "no tensor": (changed(k=lambda t: t.tolist()), "k is a list, attention takes torch tensors; convert"),
    "numpy": (changed(v=lambda t: t.float().numpy()), "v is a ndarray, attention takes torch tensors; convert"),
    "sparse": (changed(q=lambda t: t.to_sparse()), "q is a sparse or nested tensor, .* convert"),
    "float64": (changed(q=lambda t: t.double()), "q is torch.float64, attention takes .*torch.bfloat16.* cast it"),
    "int8": (changed(v=lambda t: t.char()), "v is torch.int8, attention takes .* cast it"),
    "mixed dtypes": (changed(v=lambda t: t.half()), "v is torch.float16 and q torch.bfloat16; cast"),
    "mixed devices": (changed(k=lambda t: t.to("meta")), "k is on meta and q on cpu; move"),
    "batch": (changed(k=lambda t: t[:1]), "k has batch size 1 and q 2; they must be equal"),
    "head_dim": (changed(q=lambda t: t[..., :16]), "q has head_dim 16 and k 32; they must be equal"),
    "head_dim below 8": (sized(head_dim=7), "q has head_dim 7, kernels serve 8 to 256; pad"),
    "head_dim above 256": (sized(head_dim=257), "q has head_dim 257, kernels serve 8 to 256; pad or split"),
    "head_dim of 0": (sized(head_dim=0), "q has head_dim 0, kernels serve 8 to 256"),
    "head_dim_v below 8": (sized(head_dim_v=4), "v has head_dim 4, kernels serve 8 to 256"),
    "head_dim_v above 256": (sized(head_dim_v=264), "v has head_dim 264, kernels serve 8 to 256"),
    "key lengths": (changed(v=lambda t: t[:, 1:]), "k has 2 heads × 41 keys and v 2 × 40; they must be equal"),
    "kv heads": (changed(v=lambda t: t[:, :, :1]), "k has 2 heads × 41 keys and v 1 × 41; they must be equal"),
    "groups": (sized(heads=4, kv_heads=3), "q has 4 heads, which is no multiple of the 3 kv heads.* layout right"),
    "fewer query heads": (sized(heads=1, kv_heads=2), "q has 1 heads, which is no multiple of the 2 kv heads"),
    "no kv heads": (sized(kv_heads=0), "q has 4 heads, which is no multiple of the 0 kv heads"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_an_error_with_value_rule_and_next_step(case: str) -> None:
    build, message = BAD_TENSORS[case]
    with pytest.raises(InvalidProblemError, match=message):
        attention(*build())


@pytest.mark.parametrize("backend", ["generated", "reference"])
def test_both_backends_check_the_tensors(backend: str) -> None:
    q, k, v = make(device=torch.device("cpu"))
    with pytest.raises(InvalidProblemError, match="head_dim"):
        attention(q[..., :16], k, v, backend=backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "bsdh"}, r"layout='bsdh' is not \"bshd\" .*or \"bhsd\""),
        ({"layout": None}, "layout=None is not"),
        ({"backend": "genrated"}, r"backend='genrated' is not \"generated\" or \"reference\"; leave it out"),
    ],
)
def test_a_misspelled_choice_is_an_error_that_lists_the_choices(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        attention(*make(device=torch.device("cpu")), **arguments)


def test_tensors_on_a_device_without_kernels_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="cuda and cpu tensors, not on meta"):
        attention(*make(device=torch.device("meta")))


@runs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_require_gradients_are_served_without_grad_mode(mode: Any) -> None:
    q, k, v = make()
    with mode():
        out = attention(q.requires_grad_(), k, v)
    assert torch.equal(out, attention(q.detach(), k, v))


# --- CPU tensors without the interpreter ------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "plain torch reference" in record.getMessage()]


def test_cpu_tensors_run_the_reference_and_say_so_once(reference_only: None, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make(device=torch.device("cpu"))
    with caplog.at_level(logging.WARNING, logger="fa_autotune"):
        first = attention(q, k, v, causal=True)
        second = attention(q, k, v, causal=True)
    ref, _ = attention_reference(*swapped(q, k, v), softmax_scale=32**-0.5, diagonal=4)
    assert torch.equal(first, *swapped(ref.to(BFLOAT16)))
    assert torch.equal(first, second)
    assert len(told(caplog)) == 1


def test_threads_that_come_first_together_say_it_once(reference_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []

    def slow_warning(text: str) -> None:
        notices.append(text)
        time.sleep(0.05)  # long enough for the other threads to come here

    monkeypatch.setattr(calls, "_logger", SimpleNamespace(warning=slow_warning))
    q, k, v = make(device=torch.device("cpu"))
    together(lambda: attention(q, k, v))
    assert len(notices) == 1


def test_asking_for_the_reference_says_nothing(reference_only: None, caplog: pytest.LogCaptureFixture) -> None:
    attention(*make(device=torch.device("cpu")), backend="reference")
    assert caplog.records == []


def test_the_reference_keeps_its_precision_under_autocast(reference_only: None) -> None:
    tensors = make(device=torch.device("cpu"))
    with torch.autocast("cpu", dtype=BFLOAT16):
        out = attention(*tensors, backend="reference")
    assert torch.equal(out, attention(*tensors, backend="reference"))


@pytest.mark.parametrize("softmax_scale", [None, -0.2, 0.0])
def test_the_reference_has_the_contract_of_the_kernels(softmax_scale: float | None, reference_only: None) -> None:
    tensors = make(50, 20, head_dim_v=48, device=torch.device("cpu"))
    out, lse = attention(*tensors, causal=True, softmax_scale=softmax_scale, backend="reference", return_lse=True)
    assert (out.dtype, out.shape, out.is_contiguous()) == (BFLOAT16, (2, 50, 4, 48), True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()


# --- what calls cost, and what they share -----------------------------------------------------------------------------


def together(call: Callable[[], Any], count: int = 8) -> list[Any]:
    """Results of threads that start at one moment."""
    barrier = threading.Barrier(count)

    def run(_: int) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@runs_kernels
def test_threads_that_cold_start_together_load_one_kernel(loads: list[Candidate]) -> None:
    q, k, v = make()
    results = together(lambda: attention(q, k, v, causal=True))
    assert len(loads) == 1
    assert all(torch.equal(result, results[0]) for result in results)


@runs_kernels
def test_threads_with_different_problems_do_not_disturb_each_other(cold: None) -> None:
    lengths = iter(range(20, 28))
    lock = threading.Lock()

    def call() -> None:
        with lock:
            tensors = make(next(lengths), 40, head_dim=16)
        assert_right(*tensors, causal=True)

    together(call)


@runs_kernels
@pytest.mark.parametrize("softmax_scale", [None, -0.3])
def test_a_shapes_second_call_decides_renders_and_loads_nothing(
    softmax_scale: float | None, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make()
    first = attention(q, k, v, causal=True, softmax_scale=softmax_scale)
    for module, name in (
        (Dispatcher, "decide"),
        (launch, "render"),
        (live_kernels, "load_kernel"),
        (calls, "KernelPlan"),
    ):
        monkeypatch.setattr(module, name, None)  # not to be called
    assert torch.equal(attention(q.clone(), k, v, causal=True, softmax_scale=softmax_scale), first)


@runs_kernels
def test_new_lengths_reuse_the_kernels_of_old_ones(loads: list[Candidate]) -> None:
    lengths = [1, 7, 16, 17, 33, 64, 65, 90, 127, 128, 129, 150]
    for seqlen in lengths:
        attention(*make(seqlen, seqlen, batch=1), causal=True)
    assert len(loads) <= 5


@runs_kernels
def test_a_stream_of_lengths_compiles_a_bounded_number_of_kernels(loads: list[Candidate]) -> None:
    warmup(f"1x4x2x{seqlen}x{seqlen}x32,causal" for seqlen in range(1, 4097, 5))
    warmup(f"1x4x2x1x{seqlen}x32" for seqlen in range(1, 4097, 5))
    assert len(loads) <= 12


@runs_kernels
def test_a_stream_of_lengths_does_not_fill_memory(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_REMEMBERED_CALLS", 3)
    for seqlen in range(20, 26):
        assert_right(*make(seqlen, seqlen, batch=1))
    assert len(calls._plans) == 3


@runs_kernels
def test_a_call_after_warmup_loads_nothing(loads: list[Candidate]) -> None:
    warmup(["2x4x2x37x41x32,causal", AttentionProblem.parse("2x4x2x37x41x32")])
    before = len(loads)
    attention(*make(), causal=True)
    attention(*make())
    assert len(loads) == before == 2


@runs_kernels
def test_warmup_of_a_causal_decoding_step_is_what_its_call_needs(loads: list[Candidate]) -> None:
    warmup(["2x4x2x1x300x32,causal"])
    attention(*make(1, 300), causal=True)
    assert len(loads) == 1


def test_warmup_refuses_what_is_no_problem() -> None:
    with pytest.raises(InvalidProblemError, match="no problem: write"):
        warmup(["4x32"])


@pytest.mark.parametrize("device", ["cpu", "gpu0", "cuda:x"])
def test_warmup_on_what_is_no_gpu_is_an_error(device: str, reference_only: None) -> None:
    with pytest.raises(InvalidProblemError, match=f"device='{device}' is no .*cuda:0"):
        warmup(["1x1x1x16x16x16"], device=device)


# --- databases --------------------------------------------------------------------------------------------------------

PROBLEM = AttentionProblem.parse("2x4x2x37x41x32,causal")
WINNER = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)


@pytest.fixture
def user_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None) -> Path:
    """Where a cold process finds its user's database."""
    path = tmp_path / "tuning.db"
    monkeypatch.setenv("FA_AUTOTUNE_DB", str(path))
    return path


def store_winner(path: Path) -> None:
    """WINNER as PROBLEM's winner on the interpreter, where tma would be the default."""
    with TuningDatabase(path) as database:
        session = database.begin_session(
            kind=SessionKind.CONFIRM, device=INTERPRETER, toolchain=Toolchain(triton="3.7.1")
        )
        database.save_trial(session, confirmed(1.0, 1, WINNER.BLOCK_M, problem=PROBLEM))


def tamper(path: Path, statement: str, value: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(statement, (value,)).rowcount == 1


interpreted = pytest.mark.skipif(not interpreting(), reason="a winner of Triton's interpreter needs TRITON_INTERPRET=1")


@runs_kernels
@interpreted
def test_a_winner_of_the_users_database_runs(user_database: Path, loads: list[Candidate]) -> None:
    store_winner(user_database)
    assert_right(*make(), causal=True)
    assert [(loaded.variant, loaded.config) for loaded in loads] == [(Variant.PORTABLE, WINNER)]


@runs_kernels
@interpreted
@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE kernels SET config = replace(config, '\"BLOCK_M\":64', ?)", f'"BLOCK_M":{value}')
        for value in ("1048576", "0", "-32", "48", "true", "32.0", "null", '"32"', '"{{ 7 * 7 }}"', '"__import__(1)"')
    ]
    + [
        ("UPDATE kernels SET config = replace(config, '\"num_warps\":4', ?)", '"num_warps":64'),
        ("UPDATE kernels SET config = replace(config, '\"EXACT_LENGTHS\":false', ?)", '"EXACT_LENGTHS":true'),
        ("UPDATE kernels SET config = ?", "[" * 100_000),
        ("UPDATE kernels SET config = ?", "{}"),
        ("UPDATE kernels SET variant = ?", "../../evil"),
        ("UPDATE problems SET key = ?", "{}"),
        ("UPDATE measurements SET median_ms = ?", 1e-300),
        ("UPDATE toolchains SET triton = ?", "99.0.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_tampered_winner_never_breaks_a_call(
    user_database: Path, statement: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    store_winner(user_database)
    tamper(user_database, statement, value)
    assert_right(*make(), causal=True)


@runs_kernels
@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + bytes(100), None])
def test_a_file_that_is_no_database_never_breaks_a_call(
    user_database: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is None:
        user_database.mkdir()
    else:
        user_database.write_bytes(content)
    assert_right(*make(), causal=True)


@runs_kernels
def test_explain_tells_the_origin_and_the_reasons(user_database: Path) -> None:
    text = explain("2x4x2x37x41x32,causal")
    assert "fwd bf16 d32 causal 2×4×2×37×41" in text
    assert "default, untuned" in text


@runs_kernels
@interpreted
def test_explain_names_the_winner_and_its_database(user_database: Path) -> None:
    store_winner(user_database)
    text = explain(PROBLEM)
    assert "portable 64x64 w4 s2" in text
    assert str(user_database) in text


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, cold: None) -> dict[AttentionProblem, int]:
    """A process whose GPU 0 is an untuned H200; gives the misses that it stores."""
    stored: dict[AttentionProblem, int] = {}
    monkeypatch.setattr(live_kernels, "interpreting", lambda: False)
    dispatcher = Dispatcher(
        device=KNOWN_DEVICES["h200"],
        triton_version="3.7.1",
        load=lambda: Snapshot(rows=()),
        store_misses=stored.update,
    )
    monkeypatch.setattr(live_kernels, "_dispatchers", {0: dispatcher})
    monkeypatch.setattr(live_kernels, "load_kernel", lambda candidate, *where: candidate)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stored


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 0), 0])
def test_what_ran_without_a_winner_is_stored_as_a_miss(device: Any, on_h200: dict[AttentionProblem, int]) -> None:
    warmup([PROBLEM, PROBLEM], device=device)
    assert flush_misses() == 1
    assert on_h200 == {PROBLEM: 2}
    assert flush_misses() == 0


def test_explaining_a_problem_is_no_miss(on_h200: dict[AttentionProblem, int]) -> None:
    assert "NVIDIA H200" in explain(PROBLEM, device="cuda:0")
    assert flush_misses() == 0


def test_warmup_puts_the_kernel_on_the_named_gpu(
    on_h200: dict[AttentionProblem, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[object, ...]] = []
    monkeypatch.setattr(live_kernels, "load_kernel", lambda candidate, *where: places.append(where))
    warmup([PROBLEM], device="cuda:0")
    assert places == [("sm_90", 0)]


def test_nothing_is_loaded_inside_a_capture(
    on_h200: dict[AttentionProblem, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(FaAutotuneError, match=r"not loaded and a CUDA-graph capture is under way; call .*warmup"):
        warmup([PROBLEM], device=0)


@runs_kernels
@interpreted
def test_what_the_interpreter_ran_is_no_miss(cold: None) -> None:
    attention(*make())
    assert flush_misses() == 0
