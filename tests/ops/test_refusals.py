"""What `attention` refuses, each with the value, the rule and the next step; and what it lets pass as off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from kit.attention_calls import make, runs_kernels


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
    "sparse": (changed(q=lambda t: t.to_sparse()), "q is a sparse or nested tensor, .* convert"),
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
    with pytest.raises(UnsupportedError, match="cuda and cpu tensors, not on meta"):
        attention(*make(device=torch.device("meta")))


@runs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_require_gradients_are_served_without_grad_mode(mode: Any) -> None:
    q, k, v = make()
    with mode():
        out = attention(q.requires_grad_(), k, v)
    assert torch.equal(out, attention(q.detach(), k, v))
