"""dropout_p of packed sequences: each keeps the weights that it would keep in a padded batch.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.call import FULL, GENERATED, PACKED, Call, Extras
from fa_autotune.reference.dropout import draw_seed, dropout_mask, scale_of
from kit.attention_calls import BFLOAT16, DEVICE, FLOAT32, MINUS_INF, gradient_of, requiring, runs_kernels
from kit.packed_calls import NAN, cu_seqlens, make_packed

LENGTHS = [(37, 20), (0, 7), (5, 0), (18, 40), (1, 1)]
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (20, 3), "left": (6, -1)}


def seeded(call: Any) -> Any:
    torch.manual_seed(0)
    return call()


def kept_of(num_sequences: int, heads: int, dropout_p: float, longest: int = 64) -> Tensor:
    """What the first call after `seeded` keeps of a padded batch, bool (sequences, heads, longest, longest)."""
    seed = seeded(lambda: draw_seed(torch.device(DEVICE)))
    return dropout_mask(seed, num_sequences, heads, longest, longest, dropout_p=dropout_p)


def by_definition(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, dropout_p: float, window: tuple[int, int]) -> Tensor:
    """out of LENGTHS in plain torch and fp64, sequence by sequence, with the weights that were kept."""
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[0] // k.shape[0], 0) for tensor in (k, v))
    parts, row, key = [], 0, 0
    for number, (rows, keys) in enumerate(LENGTHS):
        scores = q[:, row : row + rows] @ k[:, key : key + keys].transpose(-1, -2) / q.shape[-1] ** 0.5
        of_row, of_key = (torch.arange(count, device=q.device) for count in (rows, keys))
        distance = of_key[None, :] - of_row[:, None] - (keys - rows)
        left, right = (side if side >= 0 else 999 for side in window)
        hidden = (distance < -left) | (distance > right)
        weights = torch.softmax(scores.masked_fill(hidden, MINUS_INF), -1).masked_fill(hidden, 0.0)
        weights = weights * kept[number, :, :rows, :keys] * scale_of(dropout_p)
        parts.append(weights @ v[:, key : key + keys])
        row, key = row + rows, key + keys
    return torch.cat(parts, 1).transpose(0, 1)


@runs_kernels
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("backend", ["generated", "reference"])
def test_out_and_gradients_are_those_of_a_padded_batchs_weights(backend: str, name: str) -> None:
    window, dropout_p = WINDOWS[name], 0.3
    q, k, v, *starts = make_packed(LENGTHS, heads=4, kv_heads=2, head_dim=16, dtype=FLOAT32)
    tensors = requiring(q, k, v)
    call: dict[str, Any] = {"window_size": window, "return_lse": True, "backend": backend}
    out, lse = seeded(lambda: attention_varlen(*tensors, *starts, dropout_p=dropout_p, **call))
    expected = by_definition(*tensors, kept_of(len(LENGTHS), 4, dropout_p), dropout_p, window)
    d_out = gradient_of(out.shape, FLOAT32)
    found = [out, *torch.autograd.grad(out, tensors, d_out)]
    exact = [expected, *torch.autograd.grad(expected, tensors, d_out.double())]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.nan_to_num(nan=0.0).to(FLOAT32), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lse, attention_varlen(*tensors, *starts, **call)[1], atol=1e-5, rtol=1e-5)


@runs_kernels
def test_equal_lengths_give_what_the_batch_gives() -> None:
    q, k, v = (torch.randn(3, 33, 2, 16, device=DEVICE) for _ in range(3))
    starts = cu_seqlens([33, 33, 33])
    batch = seeded(lambda: attention(q, k, v, causal=True, dropout_p=0.4))
    packed = seeded(
        lambda: attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, causal=True, dropout_p=0.4)
    )
    torch.testing.assert_close(packed.view_as(batch), batch, atol=1e-5, rtol=1e-5)
    assert (batch == 0).any() or not torch.equal(batch, attention(q, k, v, causal=True))


@runs_kernels
def test_unused_rows_stay_zero_whatever_they_hold() -> None:
    q, k, v, *starts = make_packed([(9, 11), (0, 3)], unused=5, fill=NAN)
    tensors = requiring(q, k, v)
    out = attention_varlen(*tensors, *starts, dropout_p=0.5)
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(torch.isfinite(one).all() and not one[-5:].any() for one in (out, *gradients))


@runs_kernels
def test_flash_attns_functions_drop_the_same_weights() -> None:
    q, k, v, starts, _ = make_packed([(9, 9), (20, 20)], heads=2, kv_heads=2)
    expected = seeded(lambda: attention_varlen(q, k, v, starts, starts, causal=True, dropout_p=0.2))
    options: dict[str, Any] = {"dropout_p": 0.2, "causal": True}
    whole, pair = torch.stack([q, k, v], 1).requires_grad_(), torch.stack([k, v], 1)
    found = [
        seeded(lambda: flash_attn_varlen_func(q, k, v, starts, starts, 20, 20, **options)),
        seeded(lambda: flash_attn_varlen_kvpacked_func(q, pair, starts, starts, 20, 20, **options)),
        seeded(lambda: flash_attn_varlen_qkvpacked_func(whole, starts, 20, **options)),
    ]
    assert all(torch.equal(one, expected) for one in found)
    assert torch.autograd.grad(found[-1], whole, torch.ones_like(expected))[0].any()


@runs_kernels
def test_the_signed_probabilities_tell_what_was_dropped() -> None:
    q, k, v, *starts = make_packed(LENGTHS, heads=4, kv_heads=2, head_dim=16, dtype=FLOAT32)
    call: dict[str, Any] = {"dropout_p": 0.3, "causal": True, "return_attn_probs": True}
    out, _, signed = seeded(lambda: flash_attn_varlen_func(q, k, v, *starts, 40, 48, **call))
    assert signed.shape == (len(LENGTHS), 4, 40, 48)
    kept = kept_of(len(LENGTHS), 4, 0.3)[:, :, :40, :48]
    assert torch.equal((signed > 0) & kept, signed > 0)
    assert not (kept & (signed < 0)).any()
    row = key = 0
    for number, (rows, keys) in enumerate(LENGTHS):
        weights = signed[number, :, :rows, :keys].clamp(min=0) * scale_of(0.3)
        values = v[key : key + keys].repeat_interleave(2, 1).transpose(0, 1)
        torch.testing.assert_close((weights @ values).transpose(0, 1), out[row : row + rows], atol=1e-5, rtol=1e-5)
        assert not signed[number, :, rows:].any()
        assert not signed[number, :, :, keys:].any()
        row, key = row + rows, key + keys


@pytest.mark.parametrize("maxima", [(None, None), (torch.tensor(9), 3), (1, 1)], ids=str)
def test_the_signed_probabilities_hold_the_longest_sequence(maxima: tuple[Any, Any], reference_only: None) -> None:
    q, k, v, *starts = make_packed([(9, 5), (4, 7)], heads=2, kv_heads=2, head_dim=16, dtype=FLOAT32)
    call: dict[str, Any] = {"dropout_p": 0.3, "return_attn_probs": True}
    assert flash_attn_varlen_func(q, k, v, *starts, *maxima, **call)[2].shape == (2, 2, 9, 7)


def test_the_signed_probabilities_are_those_of_every_packed_form(reference_only: None) -> None:
    q, k, v, starts, _ = make_packed([(9, 9), (4, 4)], heads=2, kv_heads=2, head_dim=16, dtype=FLOAT32)
    call: dict[str, Any] = {"dropout_p": 0.3, "return_attn_probs": True}
    expected = seeded(lambda: flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, **call))[2]
    kv, qkv = torch.stack([k, v], 1), torch.stack([q, k, v], 1)
    of_kv = seeded(lambda: flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 9, 9, **call))[2]
    of_qkv = seeded(lambda: flash_attn_varlen_qkvpacked_func(qkv, starts, 9, **call))[2]
    assert torch.equal(of_kv, expected)
    assert torch.equal(of_qkv, expected)


@pytest.mark.parametrize(("mode", "device"), [(nullcontext, "meta"), (FakeTensorMode, "cpu")], ids=["meta", "fake"])
def test_the_signed_probabilities_of_tensors_without_memory_are_refused(mode: Any, device: str) -> None:
    refused = pytest.raises(UnsupportedError, match="S_dmask of packed sequences has the lengths that cu_seqlens holds")
    with mode():
        x, starts = torch.empty(9, 2, 16, device=device), torch.empty(2, dtype=torch.int32, device=device)
        with refused:
            flash_attn_varlen_func(x, x, x, starts, starts, 9, 9, dropout_p=0.5, return_attn_probs=True)


def test_the_signed_probabilities_of_a_trace_are_refused(reference_only: None) -> None:
    def call(q: Tensor, starts: Tensor) -> Any:
        return flash_attn_varlen_func(q, q, q, starts, starts, 9, 9, dropout_p=0.5, return_attn_probs=True)

    with pytest.raises(UnsupportedError, match="S_dmask of packed sequences has the lengths that cu_seqlens holds"):
        make_fx(call)(torch.ones(9, 2, 16), torch.tensor([0, 9], dtype=torch.int32))


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_the_signed_probabilities_have_the_dtype_that_autocast_gives(packed: bool, reference_only: None) -> None:
    q, k, v, *starts = make_packed([(9, 9)], heads=2, kv_heads=2, head_dim=16, dtype=FLOAT32)

    def signed(*tensors: Tensor) -> Tensor:
        options: dict[str, Any] = {"dropout_p": 0.3, "return_attn_probs": True}
        if packed:
            found: Tensor = seeded(lambda: flash_attn_varlen_func(*tensors, *starts, 9, 9, **options))[2]
        else:
            found = seeded(lambda: flash_attn_func(*(x[None] for x in tensors), **options))[2]
        return found

    with torch.autocast(q.device.type, dtype=BFLOAT16):
        found = signed(q, k, v)
    assert found.dtype == BFLOAT16
    assert torch.equal(found, signed(q.to(BFLOAT16), k.to(BFLOAT16), v.to(BFLOAT16)))


@runs_kernels
def test_checkpointing_and_a_compiled_call_replay_the_same_weights() -> None:
    q, k, v, *starts = make_packed([(9, 9), (20, 20)], heads=2, kv_heads=2, dtype=FLOAT32)
    d_out = gradient_of(q.shape, FLOAT32)

    def call(*tensors: Tensor) -> Tensor:
        out: Tensor = attention_varlen(*tensors, *starts, dropout_p=0.5)
        return out

    def step(run: Any) -> list[Tensor]:
        tensors = requiring(q, k, v)
        out = seeded(lambda: run(*tensors))
        return [out, *torch.autograd.grad(out, tensors, d_out)]

    expected = step(call)
    assert all(map(torch.equal, step(lambda *tensors: checkpoint(call, *tensors, use_reentrant=False)), expected))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled), expected))


def test_a_share_that_is_none_is_refused() -> None:
    tensors = make_packed([(9, 9)])
    for value in (-0.1, 1.0, float("nan")):
        with pytest.raises(InvalidProblemError, match=r"^dropout_p=.* is not from 0 to less than 1"):
            attention_varlen(*tensors, dropout_p=value)


def test_the_operators_want_a_seed_with_dropout_and_none_without() -> None:
    q, k, v, *starts = make_packed([(9, 9)])
    seed = draw_seed(q.device)
    for p, given in ((0.5, None), (0.0, seed), (0.5, seed.float())):
        call, extras = Call(None, FULL, PACKED, GENERATED, dropout_p=p), Extras(None, None, None, given, *starts)
        with pytest.raises(InvalidProblemError, match="dropout takes both, the seed int64"):
            torch.ops.fa_autotune.forward(q, k, v, *call, *extras)
