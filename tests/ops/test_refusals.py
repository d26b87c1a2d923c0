"""What `attention` refuses, each with the value, the rule and the next step; and what it lets pass as off."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import CausalVariant

from fa_autotune import (
    attention,
    attention_varlen,
    explain,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
    warmup,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from kit.attention_calls import make, make_small, runs_kernels


@pytest.mark.parametrize(
    ("name", "value"),
    [
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
    "sparse": (
        changed(q=lambda t: t.to_sparse()),
        r"q is a sparse tensor \(torch.sparse_coo\), .* convert it with to_dense",
    ),
    "float64": (changed(q=lambda t: t.double()), "q is torch.float64, attention takes .*torch.bfloat16.* cast it"),
    "int8": (changed(v=lambda t: t.char()), "v is torch.int8, attention takes .* cast it"),
    "mixed dtypes": (changed(v=lambda t: t.half()), "v is torch.float16 and q torch.bfloat16; cast"),
    "mixed devices": (changed(k=lambda t: t.to("meta")), "k is on meta and q on cpu; move"),
    "batch": (changed(k=lambda t: t[:1]), "k has batch size 1 and q 2; they must be equal"),
    "head_dim": (changed(q=lambda t: t[..., :16]), "q has head_dim 16 and k 32; they must be equal"),
    "head_dim below 8": (sized(head_dim=7), "q has head_dim 7, kernels serve 8 to 512; pad"),
    "head_dim above 512": (sized(head_dim=513), "q has head_dim 513, kernels serve 8 to 512; pad or split"),
    "head_dim of 0": (sized(head_dim=0), "q has head_dim 0, kernels serve 8 to 512"),
    "head_dim_v below 8": (sized(head_dim_v=4), "v has head_dim 4, kernels serve 8 to 512"),
    "head_dim_v above 512": (sized(head_dim_v=520), "v has head_dim 520, kernels serve 8 to 512"),
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
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="cuda and cpu tensors, not on mps"):
        attention(*(torch.empty(1, 8, 2, 16, device="mps") for _ in range(3)))


# --- yes or no --------------------------------------------------------------------------------------------------------

FLAGS: dict[str, Callable[..., Any]] = {
    "attention causal": lambda flag: attention(*make_small(), causal=flag),
    "attention return_lse": lambda flag: attention(*make_small(), return_lse=flag),
    "attention deterministic": lambda flag: attention(*make_small(), deterministic=flag),
    "attention_varlen causal": lambda flag: attention_varlen(*PACKED, causal=flag),
    "attention_varlen return_lse": lambda flag: attention_varlen(*PACKED, return_lse=flag),
    "attention_varlen deterministic": lambda flag: attention_varlen(*PACKED, deterministic=flag),
    "flash_attn_func causal": lambda flag: flash_attn_func(*make_small(), causal=flag),
    "flash_attn_func deterministic": lambda flag: flash_attn_func(*make_small(), deterministic=flag),
    "flash_attn_func return_attn_probs": lambda flag: flash_attn_func(*make_small(), return_attn_probs=flag),
    "flash_attn_varlen_func causal": lambda flag: flash_attn_varlen_func(*PACKED, 9, 9, causal=flag),
    "flash_attn_varlen_func deterministic": lambda flag: flash_attn_varlen_func(*PACKED, 9, 9, deterministic=flag),
    "flash_attn_varlen_func return_attn_probs": lambda flag: flash_attn_varlen_func(
        *PACKED, 9, 9, return_attn_probs=flag
    ),
    "flash_attn_qkvpacked_func causal": lambda flag: flash_attn_qkvpacked_func(torch.ones(1, 8, 3, 2, 16), causal=flag),
    "scaled_dot_product_attention is_causal": lambda flag: scaled_dot_product_attention(
        *[torch.ones(1, 2, 8, 16)] * 3, is_causal=flag
    ),
    "scaled_dot_product_attention enable_gqa": lambda flag: scaled_dot_product_attention(
        *[torch.ones(1, 2, 8, 16)] * 3, enable_gqa=flag
    ),
    "explain backward": lambda flag: explain("1x2x2x64x64x32", backward=flag),
    "warmup backward": lambda flag: warmup([], backward=flag),
}
PACKED = (*[torch.ones(9, 2, 16)] * 3, *[torch.tensor([0, 9], dtype=torch.int32)] * 2)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["False", 0.25, None, torch.tensor(False), np.array([1, 0]), 2, [], -1], ids=repr)
def test_a_flag_that_is_neither_true_nor_false_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidProblemError, match=rf"^{name.split()[1]} is .*; it is True or False"):
        FLAGS[name](value)


@pytest.mark.parametrize("value", [True, 1, np.True_, np.int64(1), np.array(True)], ids=repr)
def test_a_flag_may_be_a_bool_or_a_0_or_1_of_any_kind(value: Any, reference_only: None) -> None:
    q, k, v = make_small(device=torch.device("cpu"))
    out, _ = attention(q, k, v, causal=value, return_lse=value)
    assert torch.equal(out, attention(q, k, v, causal=True))
    assert attention(q, k, v, causal=value ^ value).ne(out).any()


def test_a_scale_in_the_place_of_a_flag_is_refused() -> None:
    x = torch.ones(1, 2, 8, 16)
    with pytest.raises(InvalidProblemError, match=r"is_causal is 0\.25; it is True or False"):
        scaled_dot_product_attention(x, x, x, None, 0.0, 0.25, False)  # type: ignore[arg-type]


X = torch.ones(1, 8, 2, 16)
BOOLS_AS_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "softmax_scale": lambda value: attention(X, X, X, softmax_scale=value),
    "softmax_scale, by place": lambda value: flash_attn_func(X, X, X, 0.0, value),
    "softmax_scale, packed": lambda value: flash_attn_varlen_func(*PACKED, 9, 9, 0.0, value),
    "softmax_scale, after is_causal": lambda value: scaled_dot_product_attention(X, X, X, None, 0.0, True, value),
    "softcap": lambda value: attention(X, X, X, softcap=value),
    "window_size": lambda value: attention(X, X, X, window_size=(3, value)),
    "window_size, left": lambda value: attention(X, X, X, window_size=[value, 0]),
}


@pytest.mark.parametrize("name", BOOLS_AS_NUMBERS)
@pytest.mark.parametrize("value", [True, False, np.True_, np.array(False), torch.tensor(True)], ids=repr)
def test_a_bool_in_the_place_of_a_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidProblemError, match=rf"^{name.split(',')[0]}="):
        BOOLS_AS_NUMBERS[name](value)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "softmax_scale": lambda value: attention(X, X, X, softmax_scale=value),
    "softcap": lambda value: flash_attn_func(X, X, X, softcap=value),
    "dropout_p": lambda value: scaled_dot_product_attention(X, X, X, dropout_p=value),
    "window_size": lambda value: attention(X, X, X, window_size=(value.int(), 2)),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "seen",
    [
        lambda call: call(torch.empty((), device="meta")),
        lambda call: torch.vmap(call)(torch.ones(1)),
        lambda call: make_fx(call)(torch.tensor(0.5)),
    ],
    ids=["meta", "vmap", "make_fx"],
)
def test_a_number_whose_value_cannot_be_read_is_refused(name: str, seen: Callable[..., Any]) -> None:
    with pytest.raises(
        InvalidProblemError, match=rf"^{name} is a Tensor whose value can't be read: .* a number of Pyt"
    ):
        seen(NUMBERS[name])


def test_false_is_no_dropout_and_true_is_refused(reference_only: None) -> None:
    """As in `dropout_p=self.training and 0.1`."""
    assert torch.equal(attention(X, X, X, dropout_p=False), attention(X, X, X))
    with pytest.raises(InvalidProblemError, match="dropout_p=True"):
        attention(X, X, X, dropout_p=True)


def test_a_member_of_an_enum_is_no_flag() -> None:
    """torch's own stands for another alignment, and equals 1."""
    variant = CausalVariant.UPPER_LEFT
    with pytest.raises(InvalidProblemError, match=r"causal is .*; it is True or False"):
        attention(X, X, X, causal=variant)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [{1, 2}, {1: 0, 2: 0}, b"\x01\x02", frozenset((1, 2))], ids=repr)
def test_a_window_has_an_order(value: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r"is not \(left, right\)"):
        attention(X, X, X, window_size=value)


# --- what is no tensor, no name, no problem ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: attention(None, k, v), "q is a NoneType, attention takes torch tensors"),
        (lambda q, k, v: attention(q, k, None, dropout_p=0.5), "v is a NoneType, attention takes torch tensors"),
        (lambda q, k, v: flash_attn_func(None, k, v), "q is a NoneType, attention takes torch tensors"),
        (lambda q, k, v: attention(q, k, v, backend=np.array(["a", "b"])), "backend=array.* is not"),
        (lambda q, k, v: attention(q, k, v, fp32_precision=np.array(["a", "b"])), "fp32_precision=array.* is not"),
        (lambda q, k, v: attention(q, k, v, layout=np.array(["a", "b"])), "layout=array.* is not"),
        (lambda q, k, v: attention(q, k, v, softmax_scale=np.array([1.0, 2.0])), "softmax_scale=array.* is not a num"),
        (lambda q, k, v: attention(q, k, v, softmax_scale=torch.tensor(1j)), "softmax_scale=tensor.* is not a number"),  # type: ignore[arg-type]
        (lambda q, k, v: attention(q, k, v, softcap=np.complex64(2)), "softcap=np.complex64.* is not a number"),  # type: ignore[arg-type]
        (lambda q, k, v: attention(q, k, v, window_size=None), "window_size=None is not"),
        (lambda q, k, v: warmup([None]), "problem=None is a NoneType, and no problem; write it"),  # type: ignore[list-item]
        (lambda q, k, v: warmup(None), "problems=None is no list of problems; write"),  # type: ignore[arg-type]
        (lambda q, k, v: explain(None), "problem=None is a NoneType, and no problem; write it"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_argument_at_all_is_named(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        call(*make_small())


@runs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_require_gradients_are_served_without_grad_mode(mode: Any) -> None:
    q, k, v = make()
    with mode():
        out = attention(q.requires_grad_(), k, v)
    assert torch.equal(out, attention(q.detach(), k, v))
