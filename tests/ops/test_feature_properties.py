"""Random combinations of features, shapes, strides and dtypes through the interpreter, held to the numerics rule."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.attention_calls import BFLOAT16, FLOAT16, assert_gradients_right, assert_right, interpreted, make
from kit.views import every_second_column, every_second_row, transposed

pytestmark = interpreted

VIEWS = (None, transposed, every_second_row, every_second_column)
# The same examples every time: that a random one comes to twice the error of plain torch is no news of a change.
several = settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def sides(draw: st.DrawFn) -> int:
    """One side of a window: open, narrow, or any."""
    return draw(st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, 70)))


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Tensors of a call of `attention`, and its arguments."""
    kv_heads = draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([8, 16, 24, 33]))
    tensors = make(
        draw(st.integers(1, 70)),
        draw(st.integers(1, 70)),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim, 16])),
        dtype=draw(st.sampled_from([BFLOAT16, FLOAT16])),  # float32: test_feature_kernels.py, on probes
    )
    viewed = tuple(view(tensor) if view else tensor for tensor in tensors for view in [draw(st.sampled_from(VIEWS))])
    arguments: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_size": (draw(sides()), draw(sides())),
        "softcap": draw(st.sampled_from([0.0, 0.7, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 1.0, -0.4])),
    }
    q, k, v = viewed
    heads, generator = q.shape[2], torch.Generator().manual_seed(q.shape[1])
    if draw(st.booleans()):
        size = draw(st.sampled_from([(heads,), (q.shape[0], heads)]))
        arguments["alibi_slopes"] = torch.rand(size, generator=generator) * draw(st.sampled_from([0.01, 1.0]))
    if draw(st.booleans()):
        arguments["sinks"] = torch.randn(heads, generator=generator) * draw(st.sampled_from([1.0, 10.0]))
    if q.shape[1] * k.shape[1] > 400 and draw(st.booleans()):  # the errors of fewer scores are chance
        dims = ((1, q.shape[0]), (1, heads), (1, q.shape[1]), (1, k.shape[1]))
        size = tuple(draw(st.sampled_from(pair)) for pair in dims)
        arguments["attn_mask"] = mask = torch.randn(size, generator=generator)
        if draw(st.booleans()):
            arguments["attn_mask"] = mask > -1.0
    return (q, k, v), arguments


@several
@given(calls())
def test_every_combination_follows_the_numerics_rule_forward(
    call: tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]],
) -> None:
    tensors, arguments = call
    with torch.no_grad():
        assert_right(*tensors, **arguments)


@several
@given(calls())
def test_every_combination_follows_the_numerics_rule_backward(
    call: tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]],
) -> None:
    tensors, arguments = call
    assert_gradients_right(*tensors, **arguments, factor=3.0)
