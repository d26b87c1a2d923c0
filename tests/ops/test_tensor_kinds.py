"""What kind of tensor an argument is: its meaning is read, asked for, or refused by name, and never guessed."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.tensor_kinds import check_tensor

pytestmark = pytest.mark.usefixtures("reference_only")
X = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(1))
MASK = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
STARTS = torch.tensor([0, 8], dtype=torch.int32)
of_prototypes = pytest.mark.filterwarnings("ignore:.*prototype:UserWarning", "ignore:Sparse:UserWarning")


class Named(Tensor):
    """Adds behaviour, and nothing to what memory says."""

    def name(self) -> str:
        return "named"


class Watched(Tensor):
    """Watches operations, and passes them on."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Secret(Tensor):
    """Wraps a tensor, has no memory of its own, and knows nothing of attention."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


# --- causal biases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("make_bias", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_the_mask_that_it_stands_for(make_bias: Any, sizes: tuple[int, int]) -> None:
    rows, keys = sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more rows than keys
        bias = make_bias(rows, keys)
    q, k, v = torch.randn(1, 4, rows, 16), torch.randn(1, 4, keys, 16), torch.randn(1, 4, keys, 16)
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows if make_bias is causal_lower_right else 0)
    expected = F.scaled_dot_product_attention(q, k, v, seen).nan_to_num()
    for out in (
        scaled_dot_product_attention(q, k, v, bias),
        scaled_dot_product_attention(q[0], k, v, attn_mask=bias),
        scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=bias, enable_gqa=True)
        - scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=seen, enable_gqa=True)
        + expected,
        attention(q, k, v, attn_mask=bias, layout="bhsd"),
        attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias).transpose(1, 2),
    ):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_causal_bias_goes_with_a_window() -> None:
    options = {"window_size": (3, 5), "softcap": 5.0}
    for bias in (causal_lower_right(8, 8), causal_upper_left(8, 8)):
        assert torch.equal(attention(X, X, X, attn_mask=bias, **options), attention(X, X, X, causal=True, **options))
    q, bias = X[:, 2:], causal_upper_left(6, 8)
    expected = attention(q, X, X, attn_mask=bias._materialize(), **options)
    assert torch.equal(attention(q, X, X, attn_mask=bias, **options), expected)


@pytest.mark.parametrize("attend", [attention, scaled_dot_product_attention])
def test_a_causal_bias_of_other_lengths_is_refused(attend: Any) -> None:
    x = X if attend is attention else X.transpose(1, 2)
    with pytest.raises(InvalidProblemError, match=r"causal bias for 8 queries and 9 keys, and the call has 8 and 8; "):
        attend(x, x, x, attn_mask=causal_lower_right(8, 9))


@pytest.mark.parametrize(
    "operation", [torch.clone, torch.detach, lambda bias: bias[None], lambda bias: bias.to(torch.bfloat16)]
)
def test_a_causal_bias_that_lost_its_meaning_is_refused(operation: Any) -> None:
    bias = operation(causal_upper_left(6, 9))
    q, k = torch.ones(1, 6, 2, 16), torch.ones(1, 9, 2, 16)
    with pytest.raises(InvalidProblemError, match=r"went through an operation.*causal_lower_right\(6, 9\)"):
        attention(q, k, k, attn_mask=bias)


def test_a_causal_bias_beside_is_causal_is_refused_as_every_mask() -> None:
    x = X.transpose(1, 2)
    with pytest.raises(InvalidProblemError, match="attn_mask and is_causal=True are given"):
        scaled_dot_product_attention(x, x, x, causal_upper_left(8, 8), is_causal=True)


def test_a_causal_bias_is_refused_everywhere_else() -> None:
    with pytest.raises(InvalidProblemError, match="q is a CausalBias: it stands for a mask and holds none"):
        attention(causal_upper_left(8, 8), X, X)
    with pytest.raises(InvalidProblemError, match="alibi_slopes is a CausalBias"):
        attention(X, X, X, alibi_slopes=causal_upper_left(1, 2))


# --- subclasses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Named, Watched])
def test_a_subclass_that_adds_behaviour_is_served_and_comes_back(kind: type[Tensor]) -> None:
    out = attention(X.as_subclass(kind), X, X, causal=True)
    assert type(out) is kind
    assert torch.equal(out.as_subclass(Tensor), attention(X, X, X, causal=True))


def test_a_subclass_without_a_meaning_of_its_own_is_read_beside_q_too() -> None:
    found = attention(X, X, X, attn_mask=MASK.as_subclass(Named))
    assert torch.equal(found.as_subclass(Tensor), attention(X, X, X, attn_mask=MASK))


BESIDE: dict[str, Callable[[Any], Any]] = {
    "attn_mask": lambda kind: attention(X, X, X, attn_mask=kind(MASK)),
    "alibi_slopes": lambda kind: attention(X, X, X, alibi_slopes=kind(torch.ones(2))),
    "sinks": lambda kind: attention(X, X, X, sinks=kind(torch.ones(2))),
    "cu_seqlens_q": lambda kind: attention_varlen(X[0], X[0], X[0], kind(STARTS), STARTS),
    "cu_seqlens_k": lambda kind: flash_attn_varlen_func(X[0], X[0], X[0], STARTS, kind(STARTS), 8, 8),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_answers_by_a_function_of_its_own_is_refused_beside_q(name: str) -> None:
    with pytest.raises(InvalidProblemError, match=rf"{name} is a Watched, which says by its __torch_function__ what"):
        BESIDE[name](lambda tensor: tensor.as_subclass(Watched))


def test_the_mask_of_pytorchs_drop_in_is_refused_too() -> None:
    x = X.transpose(1, 2)
    with pytest.raises(InvalidProblemError, match="attn_mask is a Watched"):
        scaled_dot_product_attention(x, x, x, MASK.as_subclass(Watched))


@of_prototypes
@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda tensor: masked_tensor(tensor, torch.ones_like(tensor, dtype=torch.bool)), "a MaskedTensor, whose mask"),
        (lambda tensor: tensor.float().to_mkldnn(), r"a tensor of mkldnn, .* to_dense\(\)"),
        (lambda tensor: tensor.to_sparse(), r"a sparse tensor \(torch.sparse_coo\), .* to_dense\(\)"),
        (lambda tensor: torch.nested.nested_tensor([tensor, tensor]), "a nested tensor, .* `attention_varlen`"),
        (
            lambda tensor: torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged),
            "a nested tensor, .* `attention_varlen`",
        ),
        (lambda tensor: torch.nn.UninitializedParameter(), "an UninitializedParameter: it has no shape yet"),
        (lambda tensor: tensor.numpy(), "a ndarray, attention takes torch tensors"),
    ],
    ids=["masked", "mkldnn", "sparse", "nested", "jagged", "lazy", "numpy"],
)
@pytest.mark.parametrize("name", ["q", *BESIDE])
def test_what_is_no_dense_tensor_is_named(name: str, made: Callable[[Tensor], Any], what: str) -> None:
    call = (lambda kind: attention(kind(X), X, X)) if name == "q" else BESIDE[name]
    with pytest.raises(InvalidProblemError, match=rf"^{name} is {what}"):
        call(made)


def test_a_subclass_that_does_not_know_attention_is_named() -> None:
    with pytest.raises(UnsupportedError, match="given a Secret, which does not know it; pass plain tensors"):
        attention(Secret(X), Secret(X), Secret(X))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of torch's quantization
def test_quantized_numbers_are_named() -> None:
    with pytest.raises(InvalidProblemError, match=r"q is torch.qint8, .* pass its dequantize\(\)"):
        attention(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), X, X)


@of_prototypes
@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda tensor: tensor.to_sparse(), r"a sparse tensor \(torch.sparse_coo\)"),
        (lambda tensor: masked_tensor(tensor, torch.ones_like(tensor, dtype=torch.bool)), "a MaskedTensor"),
    ],
    ids=["sparse", "masked"],
)
@pytest.mark.parametrize("attend", [lambda x: attention(x, x, x), lambda x: flash_attn_func(x, x, x)])
def test_a_gradient_that_is_no_dense_tensor_is_named(attend: Any, made: Callable[[Tensor], Any], what: str) -> None:
    x = X.clone().requires_grad_()
    out = attend(x)
    with pytest.raises(InvalidProblemError, match=f"the gradient of out is {what}"):
        torch.autograd.grad(out, x, made(torch.ones_like(X)))


def test_plain_tensors_parameters_and_buffers_pass() -> None:
    for tensor in (X, torch.nn.Parameter(X), torch.nn.Buffer(X)):
        check_tensor("q", tensor, beside=True)


# --- graphs that can't hold a call ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x: attention(x, x, x),
        lambda x: attention(X, X, X, causal=x),
        lambda x: attention(X, X, X, softmax_scale=x),
        lambda x: attention(X, X, X, attn_mask=x),
        lambda x: attention(X, X, X, layout=x),
        lambda x: attention(X, X, X, backend=x),
        lambda x: attention(X, X, X, fp32_precision=x),
        lambda x: attention_varlen(X[0], X[0], X[0], STARTS, STARTS, x),
        lambda x: flash_attn_qkvpacked_func(x),
        lambda x: scaled_dot_product_attention(x, x, x),
    ],
    ids=["q", "causal", "scale", "mask", "layout", "backend", "precision", "maximum", "stacked", "sdpa"],
)
def test_a_symbolic_trace_is_told_how_to_keep_the_call_whole(call: Callable[[Any], Any]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return call(x)

    with pytest.raises(InvalidProblemError, match=r"is a Proxy: .*torch\.fx\.wrap.* torch\.compile"):
        torch.fx.symbolic_trace(Model())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(
    "function",
    [
        attention,
        attention_varlen,
        flash_attn_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        scaled_dot_product_attention,
    ],
)
def test_a_script_is_told_what_to_use_instead(function: Callable[..., Any]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, x, x)

    for scripted in (function, Model()):
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.script can't translate attention; use torch\.compile"):
            torch.jit.script(scripted)
