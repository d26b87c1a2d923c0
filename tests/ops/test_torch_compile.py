"""Attention in graphs: torch.compile, export, fake tensors, tracing, and the operators that those see.

Models are compiled with backend="aot_eager", which traces and differentiates as the default one does and generates no
code.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)
from fa_autotune.ops.call import (
    BHSD,
    BHSD_STORED_AS_BSHD,
    BOTTOM_RIGHT,
    BSHD,
    FULL,
    GENERATED,
    TOP_LEFT,
    WINDOW,
    Call,
    Extras,
    Needed,
)
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    causal_or_not,
    gradient_of,
    make,
    requiring,
    runs_kernels,
    swapped,
)
from kit.views import transposed

OPS = torch.ops.fa_autotune
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch itself


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """One graph without breaks, or an error."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v, causal=True)


def assert_same(one: Callable[..., Any], other: Callable[..., Any], *tensors: Tensor) -> None:
    """Two functions have the same results and gradients, bit for bit."""
    found = []
    for function in (one, other):
        inputs = requiring(*tensors)
        out = function(*inputs)
        found.append((out.detach(), *torch.autograd.grad(out, inputs, gradient_of(out.shape, out.dtype))))
    assert all(map(torch.equal, *found))


# --- torch.compile ----------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@causal_or_not
def test_a_compiled_call_is_one_graph_with_the_results_of_the_eager_one(causal: bool, dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal=causal) * 2

    assert_same(compiled(function, dynamic=dynamic), function, *make(20, 30, batch=1))
    assert counters["stats"]["unique_graphs"] == 1


@runs_kernels
@pytest.mark.parametrize(
    "arguments",
    [
        {"window_size": (5, 2)},
        {"causal": True, "window_size": [5, -1]},
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 1.0], device=DEVICE)},
    ],
    ids=["window", "causal left", "softcap", "alibi"],
)
def test_a_compiled_call_with_a_feature_is_one_graph(arguments: dict[str, Any]) -> None:
    tensors, sinks = make(20, 30), torch.tensor([0.0, 1.0, -1.0, 3.0], device=DEVICE)

    def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, sinks=sinks, **arguments)

    assert_same(compiled(step), step, *tensors, sinks)


@runs_kernels
def test_both_results_may_be_used_and_differentiated() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out * torch.sigmoid(lse).transpose(1, 2)[..., None]

    assert_same(compiled(function), function, *make(20, 20, batch=1, dtype=FLOAT32))


def test_50_lengths_compile_once(reference_only: None) -> None:
    function = compiled(causal, dynamic=True)
    for seqlen in range(21, 71):
        inputs = requiring(
            *make(seqlen, seqlen, batch=3, heads=10, kv_heads=5, head_dim=16, device=torch.device("cpu"))
        )
        function(*inputs).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_lengths_that_change_unannounced_compile_twice(reference_only: None) -> None:
    function = compiled(causal)
    for seqlen in range(21, 31):
        function(*make(seqlen, seqlen, batch=3, heads=10, kv_heads=5, head_dim=16, device=torch.device("cpu")))
    assert counters["stats"]["unique_graphs"] == 2


STARTS = torch.tensor([0, 7, 16], dtype=torch.int32)
CHANGING: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "window": (lambda q, w: attention(q, q, q, causal=True, window_size=(w, 0)), [*range(1, 13)]),
    "both sides": (lambda q, w: attention(q, q, q, window_size=[w, w]), [*range(1, 13)]),
    "scale": (lambda q, s: attention(q, q, q, softmax_scale=s), [s / 7 for s in range(-3, 9) if s]),
    "whole scale": (lambda q, s: attention(q, q, q, softmax_scale=s), [*range(2, 14)]),
    "cap": (lambda q, s: attention(q, q, q, softcap=s), [s / 7 for s in range(1, 13)]),
    "dropout": (lambda q, s: attention(q, q, q, dropout_p=s), [s / 17 for s in range(1, 13)]),
    "all": (
        lambda q, s: flash_attn_func(q, q, q, s, s, window_size=(3, 3), softcap=s + 1, s_aux=q[0, 0, :, 0]),
        [s / 17 for s in range(1, 13)],
    ),
    "packed": (
        lambda q, s: attention_varlen(q[0], q[0], q[0], STARTS, STARTS, softmax_scale=s, softcap=s + 1),
        [s / 17 for s in range(1, 13)],
    ),
    "sdpa": (lambda q, s: scaled_dot_product_attention(q, q, q, scale=s), [s / 7 for s in range(1, 13)]),
}


@pytest.mark.parametrize("name", CHANGING)
def test_12_numbers_compile_twice(name: str, reference_only: None) -> None:
    """Once for the first value, and once for all others; the gradients are of each value, too."""
    function, values = CHANGING[name]
    graph, q = compiled(function), torch.randn(1, 16, 2, 16)
    for value in values:
        found = []
        for call in (graph, function):
            torch.manual_seed(1)
            x = q.clone().requires_grad_()
            out = call(x, value)
            found.append((out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))))
        assert all(map(torch.equal, *found))
    assert counters["stats"]["unique_graphs"] == 2


def test_the_signed_probabilities_of_changing_lengths_and_numbers_compile_twice(reference_only: None) -> None:
    slopes, sinks = torch.ones(2), torch.zeros(2)

    def call(q: Tensor, k: Tensor, number: float) -> Any:
        return flash_attn_func(
            q, k, k, number, number, True, (9, 0), number + 1, slopes, return_attn_probs=True, s_aux=sinks
        )

    graph = compiled(call)
    for number in range(1, 5):
        q, k = torch.randn(2, 16 + number, 2, 16), torch.randn(2, 20 + 2 * number, 1, 16)
        found = []
        for function in (graph, call):
            torch.manual_seed(1)
            found.append(function(q, k, number / 7))
        assert all(map(torch.equal, *found))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_12_numbers_compile_twice_where_nothing_is_recorded(mode: Any, reference_only: None) -> None:
    function, values = CHANGING["scale"]
    graph, q = compiled(function), torch.randn(1, 16, 2, 16)
    with mode():
        assert all(torch.equal(graph(q, value), function(q, value)) for value in values)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_flag_that_follows_from_lengths_is_a_flag(reference_only: None) -> None:
    q = torch.randn(1, 16, 2, 16)

    def function(q: Tensor) -> Any:
        return attention(q, q, q, causal=q.shape[1] > 4)

    assert torch.equal(compiled(function, dynamic=True)(q), attention(q, q, q, causal=True))


@runs_kernels
@pytest.mark.parametrize("kind", [torch.nn.Buffer, torch.nn.Parameter, torch.clone], ids=lambda kind: kind.__name__)
def test_a_models_own_sinks_are_in_its_graph(kind: Any, reference_only: None) -> None:
    """Also where their length is known and the heads are the graph's own number."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = kind(torch.ones(4))

        def forward(self, q: Tensor) -> Tensor:
            return attention(q, q, q, sinks=self.sinks)

    torch.compiler.reset()
    model, q = Model(), make()[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(q), model(q))


def test_a_model_around_the_call_compiles_with_it() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).unflatten(-1, (4, 3 * 16)).split(16, dim=-1)
        return F.gelu(attention(q, k, v, causal=True).flatten(2)) @ weight.T[:64]

    x, weight = torch.randn(1, 20, 32, device=DEVICE), torch.randn(32, 192, device=DEVICE) / 6
    assert_same(compiled(function), function, x, weight)


@runs_kernels
def test_strided_inputs_of_a_graph() -> None:
    assert_same(compiled(causal), causal, *(transposed(tensor) for tensor in make(20, 20, batch=1)))


@runs_kernels
def test_autocast_casts_inside_a_graph_as_outside() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.autocast(DEVICE.type, dtype=BFLOAT16):
            return attention(q, k, v, causal=True)

    tensors = make(20, 20, batch=1, dtype=FLOAT32)
    assert compiled(function)(*tensors).dtype == BFLOAT16
    assert_same(compiled(function), function, *tensors)


@runs_kernels
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_inside_a_graph(use_reentrant: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(causal, q, k, v, use_reentrant=use_reentrant)

    tensors = make(20, 20, batch=1)
    assert_same(compiled(function), causal, *tensors)


@runs_kernels
@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "qv", "kv"])
def test_a_graph_computes_only_the_needed_gradients(which: str) -> None:
    tensors = dict(zip("qkv", make(20, 20, batch=1), strict=True))
    everything = dict(tensors)
    for name, tensor in zip("qkv", requiring(*tensors.values()), strict=True):
        everything[name] = tensor
        if name in which:
            tensors[name] = tensor.detach().requires_grad_()
    causal(*everything.values()).sum().backward()
    compiled(causal)(*tensors.values()).sum().backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in which)
        assert tensor.grad is None or torch.equal(tensor.grad, everything[name].grad)


@runs_kernels
def test_the_drop_ins_compile_too() -> None:
    q, k, v = make(20, 20, batch=1, heads=2)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return scaled_dot_product_attention(*swapped(q, k, v), is_causal=True)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[0]

    for function in (packed, sdpa, flash):
        torch.compiler.reset()
        assert_same(compiled(function, dynamic=True), function, q, k, v)


def test_what_does_not_fit_is_told_inside_a_graph_too(reference_only: None) -> None:
    q, k, v = make(device=torch.device("cpu"))
    with pytest.raises(Exception, match="q has head_dim 32 and k 16; they must be equal"):
        compiled(causal)(q, k[..., :16], v)


@runs_kernels
def test_the_default_backend_compiles_it() -> None:
    function = torch.compile(causal, fullgraph=True)
    assert_same(function, causal, *make(20, 20, batch=1))


# --- torch.func inside of a graph ------------------------------------------------------------------------------------

TRANSFORMED: dict[str, tuple[Callable[..., Any], str]] = {
    "grad": (
        torch.func.grad(lambda x: attention(x, x, x).sum()),
        r"no gradient by torch\.func\.grad .* inside torch\.com",
    ),
    "grad, packed": (
        torch.func.grad(lambda x: attention_varlen(x[0], x[0], x[0], STARTS, STARTS).sum()),
        r"attention_varlen is not served under torch\.func's transforms",
    ),
    "vmap, packed": (
        torch.vmap(lambda x: attention_varlen(x, x, x, STARTS, STARTS)),
        r"attention_varlen is not served under torch\.func's transforms",
    ),
    "jvp": (lambda x: torch.func.jvp(lambda x: attention(x, x, x), (x,), (x,)), "attention has no forward-mode deriva"),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transform_inside_of_a_graph_is_refused_by_name(name: str, reference_only: None) -> None:
    transformed, message = TRANSFORMED[name]
    with pytest.raises(Exception, match=message):
        compiled(transformed)(torch.randn(1, 16, 2, 16))


# --- numbers that a graph knows only when it runs ---------------------------------------------------------------------

UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "softcap": lambda x: attention(x, x, x, softcap=torch.tensor(3.0)),
    "softcap, of numpy": lambda x: flash_attn_func(x, x, x, softcap=np.float32(3.0)),  # type: ignore[arg-type]
    "dropout_p": lambda x: attention(x, x, x, dropout_p=np.float64(0.5)),
    "window_size": lambda x: attention(x, x, x, window_size=(torch.tensor(3), 2)),  # type: ignore[arg-type]
    "window_size, of numpy": lambda x: flash_attn_func(x, x, x, window_size=(np.int64(3), np.int64(2))),  # type: ignore[arg-type]
    "window_size, one array": lambda x: attention(x, x, x, window_size=np.array([3, 2])),  # type: ignore[arg-type]
    "causal": lambda x: attention(x, x, x, causal=np.bool_(True)),  # type: ignore[arg-type]
    "is_causal": lambda x: scaled_dot_product_attention(x, x, x, is_causal=np.bool_(True)),  # type: ignore[arg-type]
    "return_lse": lambda x: attention(x, x, x, return_lse=np.bool_(True)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_decides_about_kernels_and_is_not_known_has_no_place_in_one_graph(name: str) -> None:
    argument = name.partition(",")[0]
    with pytest.raises(Exception, match=rf"{argument} is a \w+, whose value a graph does not know .* pass \w+\(…\)"):
        compiled(UNKNOWN[name])(make(device=torch.device("cpu"))[0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, which tells that it breaks the graph
def test_without_fullgraph_it_ends_the_graph(reference_only: None) -> None:
    q, k, v = make(device=torch.device("cpu"))

    def call(q: Tensor, cap: Tensor) -> Tensor:
        return attention(q, k, v, softcap=cap, causal=np.bool_(True)) + 1  # type: ignore[call-overload, no-any-return]

    cap = torch.tensor(3.0)
    assert torch.equal(torch.compile(call, backend="eager")(q, cap), call(q, cap))


@pytest.mark.parametrize("scale", [torch.tensor(0.3), np.float32(0.3)], ids=["torch", "numpy"])
def test_a_scale_may_be_computed_by_the_graph(scale: Any, reference_only: None) -> None:
    q, k, v = make(device=torch.device("cpu"))
    graph = compiled(lambda x, scale: attention(x, k, v, softmax_scale=scale / np.sqrt(x.shape[1])))
    torch.testing.assert_close(graph(q, scale), attention(q, k, v, softmax_scale=float(scale) / q.shape[1] ** 0.5))


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch itself
def test_a_backward_that_compiled_autograd_records_is_in_one_graph(reference_only: None) -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    inputs, expected = (requiring(*make(20, 20, dtype=FLOAT32, device=torch.device("cpu"))) for _ in range(2))
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        causal(*inputs).sum().backward()
    causal(*expected).sum().backward()
    for one, other in zip(inputs, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


# --- export, tracing, fake tensors ------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal=True)


def test_an_exported_program_serves_other_lengths_and_survives_saving(reference_only: None) -> None:
    cpu = torch.device("cpu")
    dim = torch.export.Dim("seqlen", min=2, max=512)
    program = torch.export.export(Model(), make(20, 20, device=cpu), dynamic_shapes={name: {1: dim} for name in "qkv"})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    tensors = make(33, 33, device=cpu)
    assert torch.equal(torch.export.load(file).module()(*tensors), causal(*tensors))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["lax", "strict"])
def test_numbers_that_follow_from_a_length_stay_open_in_an_exported_program(strict: bool, reference_only: None) -> None:
    class OfLength(torch.nn.Module):
        def forward(self, q: Tensor) -> Any:
            length = q.shape[1]
            options: dict[str, Any] = {"dropout_p": 1 / length, "softcap": length, "softmax_scale": length**-0.5}
            return attention(q, q, q, window_size=(length // 3, length // 4), **options)

    dim = torch.export.Dim("seqlen", min=4, max=99)
    sizes = {"q": {1: dim}}
    program = torch.export.export(OfLength(), (torch.randn(2, 20, 2, 16),), dynamic_shapes=sizes, strict=strict)
    q, found = torch.randn(2, 31, 2, 16), []
    for function in (program.module(), OfLength()):
        torch.manual_seed(1)
        found.append(function(q))
    assert torch.equal(*found)


def test_a_trace_holds_one_operator() -> None:
    graph = make_fx(causal)(*make(20, 20, device=torch.device("cpu"))).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets[0] is OPS.forward.default
    assert all(target.__name__ == "getitem" for target in targets[1:])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(layout: str, reference_only: None) -> None:
    def run() -> list[Tensor]:
        shapes = ((2, 6, 5, 16), (2, 3, 5, 16), (2, 3, 5, 24))
        inputs = [torch.ones(shape if layout == "bhsd" else (2, 5, shape[1], shape[3])) for shape in shapes]
        inputs = requiring(*inputs)
        out, lse = attention(*inputs, return_lse=True, layout=layout)
        (out.sum() + lse.sum()).backward()
        return [out, lse, *(tensor.grad for tensor in inputs)]

    real = run()
    with FakeTensorMode():
        fake = run()
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_a_dispatch_mode_sees_forward_and_backward(reference_only: None) -> None:
    inputs = requiring(*make(device=torch.device("cpu")))
    seen: list[Any] = []
    counting = FlopCounterMode(
        display=False,
        custom_mapping={
            OPS.forward: lambda *a, **k: seen.append("forward") or 1,
            OPS.backward: lambda *a, **k: seen.append("backward") or 1,
        },
    )
    with counting:
        causal(*inputs).sum().backward()
    assert seen == ["forward", "backward"]


# --- the operators ----------------------------------------------------------------------------------------------------


def call(mask: int = BOTTOM_RIGHT, layout: int = BSHD, scale: float | None = None, **others: Any) -> Call:
    return Call(scale, mask, layout, GENERATED, **others)


@pytest.mark.parametrize(
    "arguments",
    [
        call(),
        call(FULL, BHSD),
        call(TOP_LEFT, BHSD_STORED_AS_BSHD),
        call(scale=-0.3),
        call(scale=0.0),
        call(WINDOW, window_left=5, window_right=2),
        call(softcap=1.5),
        (*call(), *Extras(alibi_slopes=torch.rand(2, 20))),
        (*call(), *Extras(sinks=torch.rand(2, 20, requires_grad=True))),
    ],
    ids=["causal", "full bhsd", "top-left", "negative scale", "zero scale", "window", "softcap", "alibi", "sinks"],
)
def test_the_forward_operator_keeps_its_promises(arguments: tuple[Any, ...], reference_only: None) -> None:
    tensors = make(20, 20, heads=20, kv_heads=20, dtype=FLOAT32, device=torch.device("cpu"))
    torch.library.opcheck(OPS.forward.default, (*tensors, *arguments))
    torch.library.opcheck(OPS.forward.default, (*requiring(*tensors), *arguments))


@runs_kernels
def test_the_forward_operator_keeps_its_promises_with_kernels() -> None:
    torch.library.opcheck(OPS.forward.default, (*requiring(*make(20, 20, batch=1)), *call()))


@pytest.mark.parametrize("needed", [Needed(True, True, True), Needed(True, False, False), Needed(False, False, True)])
@pytest.mark.parametrize("given", ["d_out", "d_lse", "both"])
def test_the_backward_operator_keeps_its_promises(given: str, needed: Needed, reference_only: None) -> None:
    tensors = make(20, 30, dtype=FLOAT32, device=torch.device("cpu"))
    out, lse = OPS.forward(*tensors, *call())
    d_out = None if given == "d_lse" else torch.randn_like(out)
    d_lse = None if given == "d_out" else torch.randn_like(lse)
    torch.library.opcheck(OPS.backward.default, (d_out, d_lse, *tensors, out, lse, list(needed), *call()))


def test_the_backward_operator_keeps_its_promises_with_sinks(reference_only: None) -> None:
    tensors, extras = (
        make(20, 30, dtype=FLOAT32, device=torch.device("cpu")),
        Extras(torch.rand(2, 4), torch.rand(2, 4)),
    )
    out, lse = OPS.forward(*tensors, *call(), *extras)
    for needed in (Needed(True, True, True, sinks=True), Needed(False, False, False, sinks=True)):
        arguments = (torch.randn_like(out), torch.randn_like(lse), *tensors, out, lse, list(needed), *call(), *extras)
        torch.library.opcheck(OPS.backward.default, arguments)


@runs_kernels
def test_the_backward_operator_keeps_its_promises_with_kernels() -> None:
    tensors = make(20, 20, batch=1)
    out, lse = OPS.forward(*tensors, *call())
    needed = list(Needed(True, True, True))
    arguments = (torch.randn_like(out), torch.randn_like(lse), *tensors, out, lse, needed, *call())
    torch.library.opcheck(OPS.backward.default, arguments)


def test_nothing_in_eager_mode_goes_through_the_operators(
    reference_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fa_autotune.ops.autograd as differentiable

    monkeypatch.setattr(differentiable, "attention_op", None)  # not to be called
    monkeypatch.setattr(differentiable, "gradients_op", None)
    inputs = requiring(*make(device=torch.device("cpu")))
    causal(*inputs).sum().backward()
    assert inputs[0].grad is not None
