"""dropout_p: which weights are kept, that every kernel keeps the same ones, and their statistics.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_autotune import (
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.call import BSHD, FULL, GENERATED, Call, Needed
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.dropout import STEPS, draw_seed, dropout_mask, scale_of
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    MINUS_INF,
    forget_plans,
    gradient_of,
    gradients,
    make,
    make_small,
    requiring,
    runs_kernels,
)

CPU = torch.device("cpu")
backends = pytest.mark.parametrize("backend", ["generated", "reference"])


def seeded(call: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return call()


def kept_of(q: Tensor, k: Tensor, dropout_p: float, seed: int = 0) -> Tensor:
    """What the first call after `torch.manual_seed(seed)` keeps."""
    number = seeded(lambda: draw_seed(q.device), seed)
    return dropout_mask(number, q.shape[0], q.shape[2], q.shape[1], k.shape[1], dropout_p=dropout_p)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, dropout_p: float, hidden: Tensor | None = None
) -> Tensor:
    """out in plain torch and fp64, for autograd, with the weights that were kept."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[3] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, MINUS_INF)
        scores = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, -1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return ((weights * kept * scale_of(dropout_p)) @ v).transpose(1, 2)


# --- every kernel keeps the same weights ------------------------------------------------------------------------------


@runs_kernels
@backends
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "window", "dropout_p"),
    [(37, 71, (-1, -1), 0.17), (37, 71, (-1, 0), 0.9), (20, 71, (20, 3), 0.17), (50, 33, (12, -1), 0.5)],
)
def test_out_and_gradients_are_those_of_the_achieved_mask(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int], dropout_p: float, backend: str
) -> None:
    """With grouped heads, causal and in windows, also where some rows see no key."""
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
    tensors = requiring(*make(seqlen_q, seqlen_k, **sizes, dtype=FLOAT32))
    out, lse = seeded(
        lambda: attention(*tensors, window_size=window, dropout_p=dropout_p, return_lse=True, backend=backend)
    )
    left, right = window
    distance = (
        torch.arange(seqlen_k, device=DEVICE)[None, :]
        - torch.arange(seqlen_q, device=DEVICE)[:, None]
        - (seqlen_k - seqlen_q)
    )
    hidden = (distance < -(left if left >= 0 else 999)) | (distance > (right if right >= 0 else 999))
    kept = kept_of(*tensors[:2], dropout_p)
    expected = by_definition(*tensors, kept, dropout_p, hidden)
    d_out = gradient_of(out.shape, FLOAT32)
    found = [out, *torch.autograd.grad(out, tensors, d_out)]
    exact = [expected, *torch.autograd.grad(expected, tensors, d_out.double())]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(FLOAT32), atol=1e-4, rtol=1e-5)
    plain = attention(*tensors, window_size=window, return_lse=True, backend=backend)[1]
    torch.testing.assert_close(lse, plain, atol=1e-5, rtol=1e-5)


@pytest.fixture
def forward_tile(monkeypatch: pytest.MonkeyPatch, cold: None) -> Any:
    """Makes calls run kernels with a certain tile and variant."""
    from fa_autotune.dispatch import loaded_kernels as live_kernels

    load = live_kernels.load_kernel

    def use(variant: Variant, block_m: int, block_n: int) -> None:
        def loaded(candidate: Candidate, *where: Any) -> Any:
            if candidate.family.kernel_pass is Pass.BWD_DELTA:
                return load(candidate, *where)
            spec = variant_spec(candidate.family.kernel_pass, variant)
            config = spec.config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=1)
            return load(Candidate(family=candidate.family, variant=variant, config=config), *where)

        forget_plans(monkeypatch)
        monkeypatch.setattr(live_kernels, "_kernels", {})
        monkeypatch.setattr(live_kernels, "load_kernel", loaded)

    return use


@runs_kernels
def test_every_tile_and_variant_keeps_the_same_weights(forward_tile: Any) -> None:
    """Values of one hot key each make out a row of the mask: no rounding hides what is kept."""
    q, k, _ = make_small(50, 64)
    v = torch.eye(64, device=DEVICE, dtype=BFLOAT16)[None, :, None]
    d_out = torch.ones(1, 50, 2, 64, device=DEVICE, dtype=BFLOAT16)
    results = []
    for variant, block_m, block_n in (
        (Variant.PORTABLE, 32, 16), (Variant.PORTABLE, 16, 64), (Variant.TMA, 64, 32),
    ):  # fmt: skip
        forward_tile(variant, block_m, block_n)
        inputs = requiring(q, k, v)
        out = seeded(lambda inputs=inputs: attention(*inputs, dropout_p=0.4))
        results.append((out.detach() != 0, *torch.autograd.grad(out, inputs, d_out)))
    kept = kept_of(q, k, 0.4).transpose(1, 2)
    for nonzero, *grads in results:
        assert torch.equal(nonzero, kept)
        for one, other in zip(grads, results[0][1:], strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@runs_kernels
def test_a_dropped_call_goes_with_every_other_feature() -> None:
    q, k, v = requiring(*make_small(30, 40, head_dim=16, dtype=FLOAT32))
    mask = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    features: dict[str, Any] = {
        "softcap": 2.0, "alibi_slopes": torch.tensor([0.3, 0.1], device=DEVICE), "attn_mask": mask,
        "sinks": torch.tensor([1.0, -2.0], device=DEVICE).requires_grad_(), "window_size": (30, 4), "dropout_p": 0.25,
    }  # fmt: skip
    leaves = [q, k, v, mask, features["sinks"]]
    results = []
    for backend in ("generated", "reference"):
        out = seeded(lambda backend=backend: attention(q, k, v, **features, backend=backend))
        results.append([out, *torch.autograd.grad(out, leaves, gradient_of(out.shape, FLOAT32))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@runs_kernels
@pytest.mark.parametrize("dropout_p", [1e-9, 0.9999999])
def test_the_ends_of_p_leave_no_nan(dropout_p: float) -> None:
    tensors = requiring(*make_small(20, 20, heads=1))
    out = attention(*tensors, dropout_p=dropout_p)
    grads = torch.autograd.grad(out, tensors, gradient_of(out.shape))
    assert all(torch.isfinite(tensor).all() for tensor in (out, *grads))
    if dropout_p < 0.5:
        torch.testing.assert_close(out, attention(*tensors), atol=1e-2, rtol=1e-2)


@runs_kernels
def test_rows_without_a_visible_key_stay_zero_under_dropout() -> None:
    tensors = requiring(*make_small(50, 20, heads=1))
    out, lse = attention(*tensors, causal=True, dropout_p=0.3, return_lse=True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()
    dq, *others = torch.autograd.grad(out, tensors, gradient_of(out.shape))
    assert (dq[:, :30] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in (dq, *others))


@runs_kernels
def test_keys_before_every_window_are_never_read_under_dropout() -> None:
    """Dropout takes keys by whole 16: those before the first that a row sees are not among them."""
    q, k, v = make_small(20, 100, heads=1)
    call = {"window_size": (9, 0), "dropout_p": 0.3}
    clean = seeded(lambda: (attention(q, k, v, **call), *gradients(q, k, v, **call)))
    k[:, :70], v[:, :70] = float("nan"), float("nan")
    found = seeded(lambda: (attention(q, k, v, **call), *gradients(q, k, v, **call)))
    assert all(map(torch.equal, found, clean))


def test_descriptors_do_not_serve_dropout_in_a_window() -> None:
    """They would read keys that no row sees; dk and dv take whole blocks of keys anyway."""
    for kernel_pass, served in ((Pass.FWD, False), (Pass.BWD_DQ, False), (Pass.BWD_DKDV, True)):
        problem = AttentionProblem.parse(f"1x2x2x64x64x64,left=9,dropout,{kernel_pass}")
        reason = variant_spec(kernel_pass, Variant.TMA).supports(problem.family, "sm_90", (3, 6))
        assert (reason is None) == served
        assert served or "dropout wants whole 16 keys" in str(reason)


@runs_kernels
def test_no_dropout_runs_the_plain_kernel_and_every_p_one_other(loads: list[Candidate]) -> None:
    q, k, v = make_small()
    plain = attention(q, k, v)
    assert torch.equal(attention(q, k, v, dropout_p=0), plain)
    for dropout_p in (0.1, 0.5, torch.tensor(0.7)):
        attention(q, k, v, dropout_p=dropout_p)
    assert [candidate.family.dropout for candidate in loads] == [False, True]


@runs_kernels
def test_unaligned_tensors_under_dropout(loads: list[Candidate]) -> None:
    q, k, v = make_small(20, 24, head_dim=33, dtype=FLOAT32)
    out = seeded(lambda: attention(q, k, v, dropout_p=0.3))
    torch.testing.assert_close(out, by_definition(q, k, v, kept_of(q, k, 0.3), 0.3).to(FLOAT32), atol=1e-5, rtol=1e-5)
    assert {candidate.family.access for candidate in loads} == {Access.ANY}


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.001, 0.17, 0.5, 0.93])
def test_the_share_of_kept_weights_is_binomial(dropout_p: float) -> None:
    """In all, in each (batch, head), row and key: within 5 standard deviations."""
    kept = dropout_mask(torch.tensor([1234]), 3, 4, 256, 512, dropout_p=dropout_p).double()
    expected = 1.0 / scale_of(dropout_p)
    assert abs(expected - (1 - dropout_p)) <= 0.5 / STEPS
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 3), (0, 1, 2)):
        means = kept.mean(axes)
        deviation = (expected * (1 - expected) / (kept.numel() / means.numel())) ** 0.5
        assert ((means - expected).abs() <= 5 * deviation).all()


@pytest.mark.parametrize(
    ("what", "shift"),
    [
        ("rows", (0, 0, 1, 0)),
        ("rows of a group", (0, 0, 8, 0)),
        ("keys", (0, 0, 0, 1)),
        ("keys of a group", (0, 0, 0, 8)),
        ("heads", (0, 1, 0, 0)),
        ("batches", (1, 0, 0, 0)),
        ("pairs", (0, 0, 8, 9)),
    ],
)
def test_neighbours_are_kept_independently(what: str, shift: tuple[int, ...]) -> None:
    kept = dropout_mask(torch.tensor([77]), 2, 4, 256, 256, dropout_p=0.5).double() - 0.5
    shifted = kept.roll(shift, (0, 1, 2, 3))
    correlation = (kept * shifted).mean().item() / 0.25
    assert abs(correlation) <= 5 / kept.numel() ** 0.5, what


def test_seeds_differ_and_their_upper_half_counts() -> None:
    masks = [dropout_mask(torch.tensor([seed]), 1, 2, 64, 64, dropout_p=0.5) for seed in (0, 1, 2**32, -1, 2**61 + 1)]
    for number, one in enumerate(masks):
        for other in masks[:number]:
            assert 0.4 < (one == other).double().mean() < 0.6


def test_a_higher_p_drops_the_same_weights_and_more() -> None:
    low, high = (dropout_mask(torch.tensor([5]), 1, 2, 64, 64, dropout_p=p) for p in (0.2, 0.4))
    assert not (high & ~low).any()


@runs_kernels
def test_each_call_draws_new_weights_and_a_seed_repeats_them() -> None:
    q, k, v = make_small()
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(seeded(lambda: attention(q, k, v, dropout_p=0.5)) for _ in range(2)))


@runs_kernels
def test_the_mean_of_many_calls_is_the_plain_result() -> None:
    q, k, v = make_small(16, 20, dtype=FLOAT32)
    mean = torch.stack([attention(q, k, v, dropout_p=0.3, backend="reference") for _ in range(100)]).mean(0)
    plain = attention(q, k, v)
    assert (mean - plain).abs().mean() < 0.12 * plain.abs().mean()


# --- through torch ----------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_drops_the_same_weights_again(reentrant: bool) -> None:
    tensors = requiring(*make_small(16, 20, head_dim=16, dtype=FLOAT32))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, dropout_p=0.4)
        return out.sin()

    d_out = gradient_of(tensors[0].shape, FLOAT32)
    plain = seeded(lambda: torch.autograd.grad(step(*tensors), tensors, d_out))
    for tensor in tensors:
        tensor.grad = None
    seeded(lambda: checkpoint(step, *tensors, use_reentrant=reentrant)).backward(d_out)
    assert all(torch.equal(tensor.grad, one) for tensor, one in zip(tensors, plain, strict=True))


def test_a_compiled_call_has_the_gradients_of_its_own_weights(reference_only: None) -> None:
    """The seed is drawn beside the operator, so that forward and backward share it."""
    q, k, v = requiring(*make_small(20, 24, dtype=FLOAT32, device=CPU))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, dropout_p=0.4)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out = seeded(lambda: compiled(q, k, v))
    expected = seeded(lambda: step(q, k, v))
    assert torch.equal(out, expected)
    d_out = torch.randn(out.shape)
    pairs = zip(*(torch.autograd.grad(one, (q, k, v), d_out) for one in (out, expected)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_operators_keep_their_promises_with_dropout(reference_only: None) -> None:
    tensors = requiring(*make(20, 30, dtype=FLOAT32, device=CPU))
    call, seed = Call(None, FULL, BSHD, GENERATED, dropout_p=0.3), torch.tensor([99])
    torch.library.opcheck(torch.ops.fa_autotune.forward.default, (*tensors, *call), {"dropout_seed": seed})
    out, lse = (one.detach() for one in torch.ops.fa_autotune.forward(*tensors, *call, dropout_seed=seed))
    plain = (one.detach() for one in (torch.randn_like(out), torch.randn_like(lse), *tensors, out, lse))
    arguments = (*plain, list(Needed(True, True, True)), *call)
    torch.library.opcheck(torch.ops.fa_autotune.backward.default, arguments, {"dropout_seed": seed})


def test_func_grad_drops_what_autograd_drops(reference_only: None) -> None:
    q, k, v = make_small(20, 24, dtype=FLOAT32, device=CPU)

    def loss(q: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, dropout_p=0.4)
        return out.square().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = seeded(lambda: torch.autograd.grad(loss(leaf), leaf))
    torch.testing.assert_close(seeded(lambda: torch.func.grad(loss)(q)), expected)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_refuses_dropout(randomness: str, reference_only: None) -> None:
    q, k, v = (torch.stack([tensor, tensor]) for tensor in make_small(20, 24, dtype=FLOAT32, device=CPU))
    mapped = torch.func.vmap(lambda q, k, v: attention(q, k, v, dropout_p=0.4), randomness=randomness)
    with pytest.raises(RuntimeError if randomness == "error" else UnsupportedError, match=r"vmap"):
        mapped(q, k, v)


# --- drop-ins ---------------------------------------------------------------------------------------------------------


@runs_kernels
def test_flash_attn_functions_drop_alike_and_tell_what() -> None:
    q, k, v = make_small(30, 30, heads=2, kv_heads=2, dtype=FLOAT32)
    options: dict[str, Any] = {"dropout_p": 0.3, "causal": True}
    expected = seeded(lambda: attention(q, k, v, **options))
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    calls = (
        lambda: flash_attn_func(q, k, v, **options, return_attn_probs=True),
        lambda: flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options, return_attn_probs=True),
        lambda: flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True),
    )
    kept = kept_of(q, k, 0.3)
    for call in calls:
        out, lse, dropped = seeded(call)
        assert torch.equal(out, expected)
        torch.testing.assert_close(lse, attention(q, k, v, causal=True, return_lse=True)[1], atol=1e-5, rtol=1e-5)
        visible = torch.ones(30, 30, dtype=torch.bool, device=DEVICE).tril().expand_as(dropped)
        assert torch.equal((dropped > 0)[visible], kept[visible])
        torch.testing.assert_close(dropped.abs().sum(-1), torch.ones(1, 2, 30, device=DEVICE))
    out = seeded(lambda: flash_attn_qkvpacked_func(qkv, **options))
    (found,) = torch.autograd.grad(out, qkv, gradient_of(out.shape, FLOAT32))
    exact = seeded(lambda: gradients(q, k, v, **options))
    assert all(map(torch.equal, found.unbind(2), exact))


@runs_kernels
def test_sdpa_drops_the_share_that_pytorch_drops() -> None:
    """Values of one hot key each show what is kept."""
    q = torch.zeros(2, 3, 64, 16, device=DEVICE)
    v = torch.eye(64, device=DEVICE).expand(2, 3, 64, 64)
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = seeded(lambda call=call: call(q, q, v, dropout_p=0.25))
        assert abs((out != 0).double().mean().item() - 0.75) < 0.02
        torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 64 / 0.75), atol=1e-5, rtol=1e-4)


@runs_kernels
def test_sdpa_of_other_dimensions_takes_dropout_and_a_mask() -> None:
    q = torch.randn(2, 2, 1, 20, 16, device=DEVICE)
    mask = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).tril()
    out = seeded(lambda: scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5))
    flat = q.reshape(4, 20, 1, 16)
    expected = by_definition(flat, flat, flat, kept_of(flat, flat, 0.5), 0.5, ~mask)
    torch.testing.assert_close(out, expected.transpose(1, 2).reshape(q.shape).to(FLOAT32), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, float("nan"), "0.1", None])
def test_a_p_that_is_none_is_an_error(dropout_p: Any) -> None:
    tensors = make(device=CPU)
    for call in (attention, flash_attn_func, scaled_dot_product_attention):
        with pytest.raises(InvalidProblemError, match=r"dropout_p=.* (is not from 0 to less than 1|is not a number)"):
            call(*tensors, dropout_p=dropout_p)  # type: ignore[operator]
    if isinstance(dropout_p, float):
        with pytest.raises(InvalidProblemError, match=r"dropout_p=.* is not from 0 to less than 1"):
            dropout_mask(torch.tensor([1]), 1, 1, 1, 1, dropout_p=dropout_p)


def test_an_operator_without_a_seed_is_an_error() -> None:
    tensors = make(device=CPU)
    with pytest.raises(InvalidProblemError, match=r"dropout_p=0\.3 with dropout_seed=None: dropout takes both"):
        torch.ops.fa_autotune.forward(*tensors, *Call(None, FULL, BSHD, GENERATED, dropout_p=0.3))
