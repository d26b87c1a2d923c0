"""flash-attn's functions beside what they replace: signatures, meaning, gradients in one piece, what is refused."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from kit.attention_calls import (
    DEVICE,
    causal_or_not,
    gradient_of,
    make,
    requiring,
    results_and_gradients,
    runs_kernels,
)
from kit.packed_calls import gradient_like, make_packed, varlen_gradients_of

CPU = torch.device("cpu")
SLOPES = torch.tensor([0.5, 0.25, 0.06, 0.02], device=DEVICE)
FLASH_ATTN_2_8 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SINKS = "learnable_sink=None, s_aux=None"  # as flash-attn's successors call them
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"


@pytest.mark.parametrize(
    ("function", "tensors", "more"),
    [
        (flash_attn_func, "q, k, v", ""),
        (flash_attn_kvpacked_func, "q, kv", ""),
        (flash_attn_qkvpacked_func, "qkv", ""),
        (flash_attn_varlen_func, f"q, k, v, {LENGTHS}", ", block_table=None"),
        (flash_attn_varlen_kvpacked_func, f"q, kv, {LENGTHS}", ""),
        (flash_attn_varlen_qkvpacked_func, "qkv, cu_seqlens, max_seqlen", ""),
    ],
)
def test_the_parameters_are_those_of_flash_attn_2_8(function: Callable[..., Any], tensors: str, more: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(plain)) == f"({tensors}, {FLASH_ATTN_2_8}{more}, {SINKS})"


@pytest.mark.parametrize("name", ["learnable_sink", "s_aux"])
def test_sinks_go_by_either_name_and_have_a_gradient(name: str, reference_only: None) -> None:
    (q, k, v), sinks = make(9, 12, batch=1, device=CPU, dtype=torch.float32), torch.randn(4)

    def gradients_by(function: Callable[..., Any], *tensors: torch.Tensor, **more: Any) -> list[torch.Tensor]:
        return results_and_gradients(lambda s, *x: function(*x, **{name: s}, **more), sinks, *tensors)

    expected = results_and_gradients(lambda s, *x: attention(*x, sinks=s), sinks, q, k, v)
    assert all(map(torch.equal, gradients_by(flash_attn_func, q, k, v), expected))
    kv = gradients_by(flash_attn_kvpacked_func, q, torch.stack([k, v], 2))
    assert all(map(torch.equal, kv[:3], expected[:3]))
    starts = {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32), "max_seqlen_q": 9}
    starts.update(cu_seqlens_k=torch.tensor([0, 12], dtype=torch.int32), max_seqlen_k=12)
    packed = gradients_by(flash_attn_varlen_func, q[0], k[0], v[0], **starts)
    torch.testing.assert_close(packed[1], expected[1])


def test_sinks_by_both_names_are_refused() -> None:
    q, k, v = make(9, 12, device=CPU)
    with pytest.raises(InvalidProblemError, match="learnable_sink and s_aux are given; both name the sinks"):
        flash_attn_func(q, k, v, learnable_sink=torch.ones(4), s_aux=torch.ones(4))


# --- a batch ----------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
def test_flash_attn_func_is_attention(causal: bool) -> None:
    tensors = make(20, 30, batch=1)
    expected = results_and_gradients(lambda *x: attention(*x, causal=causal, softmax_scale=0.3), *tensors)
    found = results_and_gradients(lambda *x: flash_attn_func(*x, 0.0, 0.3, causal), *tensors)
    assert all(map(torch.equal, found, expected))


@runs_kernels
def test_asking_for_probabilities_gives_out_lse_and_none() -> None:
    q, k, v = make(20, 30)
    out, lse, probabilities = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected, expected_lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert probabilities is None


@runs_kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_selects_nothing_else(deterministic: bool) -> None:
    q, k, v = make(20, 30, batch=1)
    assert torch.equal(flash_attn_func(q, k, v, deterministic=deterministic), attention(q, k, v))


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("with_lse", [False, True])
def test_packed_qkv_is_its_parts(with_lse: bool, causal: bool) -> None:
    qkv = torch.stack(make(30, 30, batch=1, heads=2), dim=2)
    options = {"causal": causal, "return_attn_probs": with_lse}
    found = results_and_gradients(lambda x: flash_attn_qkvpacked_func(x, **options), qkv)
    expected = results_and_gradients(lambda x: flash_attn_func(*x.unbind(2), **options), qkv)
    assert all(map(torch.equal, found, expected))


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("which", ["q", "kv", "q and kv"])
def test_packed_kv_is_its_parts(which: str, causal: bool) -> None:
    q, k, v = make(20, 30, batch=1)
    tensors = {"q": q, "kv": torch.stack([k, v], dim=2)}
    found: list[list[Tensor]] = []
    for function in (flash_attn_kvpacked_func, lambda q, kv, causal: flash_attn_func(q, *kv.unbind(2), causal=causal)):
        inputs = {name: t.clone().requires_grad_(name in which.split(" and ")) for name, t in tensors.items()}
        out = function(**inputs, causal=causal)
        out.backward(gradient_of(out.shape))
        found.append([out.detach(), *(t.grad for t in inputs.values() if t.grad is not None)])
    assert len(found[0]) == 1 + len(which.split(" and "))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
def test_packed_gradients_of_the_reference(scale: float | None, reference_only: None) -> None:
    qkv = torch.stack(make(30, 30, heads=2, device=CPU), dim=2)
    found = results_and_gradients(lambda x: flash_attn_qkvpacked_func(x, softmax_scale=scale, causal=True), qkv)
    expected = results_and_gradients(lambda x: flash_attn_func(*x.unbind(2), softmax_scale=scale, causal=True), qkv)
    assert all(map(torch.equal, found, expected))


def test_a_second_derivative_of_a_packed_tensor_is_refused(reference_only: None) -> None:
    qkv = torch.stack(make(30, 30, heads=2, device=CPU), dim=2).requires_grad_()
    (gradient,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv).square().sum(), qkv, create_graph=True)
    assert gradient.shape == qkv.shape
    with pytest.raises(UnsupportedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("shape", [(2, 30, 2, 4, 16), (2, 30, 4, 3, 16), (2, 30, 3, 16)])
def test_a_tensor_that_is_not_packed_as_it_should_be_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InvalidProblemError, match=r"qkv has shape .* it is \(batch, seqlen, 3, heads, head_dim\): stack"
    ):
        flash_attn_qkvpacked_func(torch.ones(shape))


def test_a_list_of_parts_is_an_error() -> None:
    with pytest.raises(InvalidProblemError, match=r"kv is a list; it is \(batch, seqlen, 2, heads, head_dim\)"):
        flash_attn_kvpacked_func(torch.ones(2, 30, 4, 16), [torch.ones(2, 30, 4, 16)] * 2)  # type: ignore[arg-type]


# --- packed sequences -------------------------------------------------------------------------------------------------


@runs_kernels
def test_flash_attns_function_is_ours() -> None:
    tensors, (maximum, _) = make_packed(), (37, 41)
    out, lse, probabilities = flash_attn_varlen_func(*tensors, maximum, 41, causal=True, return_attn_probs=True)
    expected, expected_lse = attention_varlen(*tensors, causal=True, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (lse.shape, probabilities) == ((4, tensors[0].shape[0]), None)
    assert torch.equal(flash_attn_varlen_func(*tensors, maximum, 41, softcap=-1.0), attention_varlen(*tensors))


@runs_kernels
@pytest.mark.parametrize("slopes", [None, SLOPES])
@pytest.mark.parametrize("kv_only", [False, True])
def test_packed_tensors_give_the_bits_of_their_parts(kv_only: bool, slopes: Tensor | None) -> None:
    q, k, v, starts, _ = make_packed([(9, 9), (0, 0), (20, 20)], kv_heads=4, head_dim=16)
    d_out = gradient_like((q, k, v))
    packed = torch.stack([k, v] if kv_only else [q, k, v], 1).requires_grad_()
    (rows,) = requiring(q)
    options: dict[str, Any] = {"causal": True, "alibi_slopes": slopes, "return_attn_probs": True}
    if kv_only:
        out, lse, _ = flash_attn_varlen_kvpacked_func(rows, packed, starts, starts, 20, 20, **options)
    else:
        out, lse, _ = flash_attn_varlen_qkvpacked_func(packed, starts, 20, **options)
    arguments = {"causal": True, "alibi_slopes": slopes}
    expected, expected_lse = attention_varlen(q, k, v, starts, starts, **arguments, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    dq, dk, dv = varlen_gradients_of((q, k, v, starts, starts), d_out, **arguments)
    out.backward(d_out)
    assert torch.equal(packed.grad, torch.stack([dk, dv] if kv_only else [dq, dk, dv], 1))
    assert not kv_only or torch.equal(rows.grad, dq)


@runs_kernels
def test_packed_results_without_a_gradient() -> None:
    q, k, v, starts, _ = make_packed([(9, 9), (20, 20)], kv_heads=4, head_dim=16)
    found = flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), starts, 20)
    assert torch.equal(found, attention_varlen(q, k, v, starts, starts))


# --- gradients in one piece -------------------------------------------------------------------------------------------

STARTS = torch.tensor([0, 9, 9, 29], dtype=torch.int32, device=DEVICE)


def rows_of(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """A batch of one as packed sequences."""
    return [tensor.squeeze(0) for tensor in tensors]


def by_parts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flash_attn_func(q, k, v, **options)


def packed_by_parts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flash_attn_varlen_func(q, k, v, STARTS, STARTS, 20, 20, **options)


def of_qkv(qkv: Tensor, **options: Any) -> Any:
    return flash_attn_qkvpacked_func(qkv, **options)


def of_kv(kv: Tensor, q: Tensor, **options: Any) -> Any:
    return flash_attn_kvpacked_func(q, kv, **options)


def packed_of_qkv(qkv: Tensor, **options: Any) -> Any:
    return flash_attn_varlen_qkvpacked_func(qkv, STARTS, 20, **options)


def packed_of_kv(kv: Tensor, q: Tensor, **options: Any) -> Any:
    return flash_attn_varlen_kvpacked_func(q, kv, STARTS, STARTS, 20, 20, **options)


@runs_kernels
@pytest.mark.parametrize(
    "options",
    [{}, {"alibi_slopes": SLOPES[:2]}, {"dropout_p": 0.3}, {"alibi_slopes": SLOPES[:2], "dropout_p": 0.3}],
    ids=["plain", "alibi", "dropout", "both"],
)
@pytest.mark.parametrize("function", [of_qkv, of_kv, packed_of_qkv, packed_of_kv])
def test_the_gradient_of_a_stacked_tensor_is_written_in_one_piece(
    function: Callable[..., Any], options: dict[str, Any], cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit that of its parts, whatever the call has."""
    is_packed, is_whole = function in (packed_of_qkv, packed_of_kv), function in (of_qkv, packed_of_qkv)
    q, k, v = make(29, 29, batch=1, heads=2, head_dim=16)
    if is_packed:
        q, k, v = rows_of((q, k, v))
    axis = 1 if is_packed else 2
    stacked = torch.stack([q, k, v] if is_whole else [k, v], axis).requires_grad_()
    options = {"causal": True, **options}
    torch.manual_seed(0)
    parts = results_and_gradients(lambda *x: (packed_by_parts if is_packed else by_parts)(*x, **options), q, k, v)
    monkeypatch.setattr(torch, "stack", None)  # not to be called
    torch.manual_seed(0)
    out = function(stacked, *([] if is_whole else [q]), **options)
    (whole,) = torch.autograd.grad(out, stacked, gradient_of(out.shape))
    assert torch.equal(out, parts[0])
    assert whole.is_contiguous()
    assert all(map(torch.equal, whole.unbind(axis), parts[1:] if is_whole else parts[2:]))
