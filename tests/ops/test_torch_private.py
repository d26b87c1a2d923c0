"""What torch keeps private: it is there in this torch, and where it is not, its fallback is taken and serves."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops import torch_private
from fa_autotune.ops.torch_private import found

ON_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
# Name here → where torch keeps it.
PRIVATE = {
    "is_transforming": "_C._are_functorch_transforms_active",
    "tracing_state": "_C._get_tracing_state",
    "transforms": "_C._functorch.get_interpreter_stack",
    "is_in_dispatch_mode": "utils._python_dispatch.is_in_torch_dispatch_mode",
    "is_batched": "_C._functorch.is_legacy_batchedtensor",
    "unwrap_dead_wrappers": "_functorch.utils.unwrap_dead_wrappers",
    "is_fake": "_subclasses.fake_tensor.is_fake",
    "make_autograd_impl": "_library.autograd.make_autograd_impl",
    "autograd_info": "_library.autograd.Info",
}
OF_CUDA = {
    "empty_strided_cuda": "_C._dynamo.guards._empty_strided_cuda",
    "current_gpu": "_C._cuda_getDevice",
}
every_private_thing = pytest.mark.parametrize(
    "name", [*PRIVATE, *(pytest.param(one, marks=ON_CUDA) for one in OF_CUDA)]
)


def kept_at(name: str) -> tuple[Any, str]:
    """The object of torch that has what a name here stands for, and its name there."""
    *path, last = {**PRIVATE, **OF_CUDA}[name].split(".")
    owner: Any = torch
    for part in path:
        owner = getattr(owner, part)
    return owner, last


def without(patch: pytest.MonkeyPatch, *names: str) -> ModuleType:
    """The module as it is imported by a torch that lacks these; the one that is in use stays as it is."""
    for name in names:
        owner, last = kept_at(name)
        patch.delattr(owner, last, raising=False)
    spec = importlib.util.spec_from_file_location("torch_private_of_another_torch", torch_private.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- looking for it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["_C.no_such", "_C.no_such.further", "no_such_module.thing", "nn.no_such_module", "__version__.upper.no_such"],
)
def test_what_is_not_found_is_the_fallback(path: str) -> None:
    fallback = object()
    assert found(path, fallback) is fallback


def test_what_is_found_may_lie_in_a_module_that_nobody_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.throughput_benchmark as module

    monkeypatch.delattr(torch.utils, "throughput_benchmark")
    monkeypatch.delitem(sys.modules, "torch.utils.throughput_benchmark")
    assert found("utils.throughput_benchmark.ThroughputBenchmark", None) is not None
    assert found("utils.throughput_benchmark", None) is not module
    assert found("nn.functional.relu", None) is torch.nn.functional.relu


@every_private_thing
def test_this_torch_has_it(name: str) -> None:
    """So that a release that moves it is noticed: a fallback is slower, or knows less."""
    assert getattr(torch_private, name) is getattr(*kept_at(name))


# --- without it -------------------------------------------------------------------------------------------------------

FALLBACKS: dict[str, Callable[[Any], bool]] = {
    "empty_strided_cuda": lambda fallback: fallback is None,
    "current_gpu": lambda fallback: fallback is torch.cuda.current_device,
    "is_transforming": lambda fallback: fallback() is False,
    "tracing_state": lambda fallback: fallback() is None,
    "transforms": lambda fallback: fallback() is None,
    "is_in_dispatch_mode": lambda fallback: fallback() is False,
    "is_batched": lambda fallback: fallback(torch.ones(1)) is False,
    "unwrap_dead_wrappers": lambda fallback: fallback((1, None)) == (1, None),
    "is_fake": lambda fallback: fallback(torch.ones(1)) is False,
    "make_autograd_impl": lambda fallback: fallback is None,
    "autograd_info": lambda fallback: fallback is None,
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_torch_without_it_gets_the_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = without(monkeypatch, name)
    assert FALLBACKS[name](getattr(module, name))
    others = PRIVATE.keys() - {name}
    assert all(getattr(module, one) is getattr(torch_private, one) for one in others)


def test_all_that_is_kept_here_has_a_test_of_its_fallback() -> None:
    kept = re.findall(r"^(\w+): .+ = found\(", Path(torch_private.__file__).read_text(), re.MULTILINE)
    assert set(kept) == FALLBACKS.keys() == {**PRIVATE, **OF_CUDA}.keys()


def test_a_profiler_that_records_is_seen_and_missed_where_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_private.is_profiling()
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    assert torch_private.is_profiling()
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert not without(monkeypatch).is_profiling()


def test_functionalize_is_seen_at_any_depth() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_functionalizing())
        return x.sum()

    x = torch.ones(2)
    for transformed in (look, torch.func.grad(look), torch.func.functionalize(look)):
        transformed(x)
    torch.func.functionalize(torch.func.grad(look))(x)
    assert seen == [False, False, True, True]


def test_an_open_level_of_forward_mode_is_seen_and_taken_for_granted_where_torch_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not torch_private.has_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.has_forward_mode()
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    assert torch_private.has_forward_mode()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward mode
def test_a_tangent_is_seen() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert torch_private.has_tangent(dual)
        assert not torch_private.has_tangent(torch.ones(2))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def test_a_functions_inner_entry_does_what_its_own_does() -> None:
    apply, x = torch_private.apply_of(Double), torch.ones(2, requires_grad=True)
    assert apply != Double.apply
    for entry in (apply, Double.apply):
        out = entry(x)
        (gradient,) = torch.autograd.grad(out, x, torch.ones(2))
        assert (out.tolist(), gradient.tolist()) == ([2, 2], [2, 2])


def test_a_function_whose_inner_entry_is_not_known_is_applied_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        pass

    class Ours(Plain):
        @classmethod
        def apply(cls) -> None: ...

    monkeypatch.setattr(torch.autograd, "Function", Plain)
    assert torch_private.apply_of(Ours) == Ours.apply  # type: ignore[arg-type]


def test_an_operator_can_be_defined_again_once_its_library_is_taken_down() -> None:
    library = torch.library.Library("fa_autotune_test_of_taking_down", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    torch_private.take_down(library)
    again = torch.library.Library("fa_autotune_test_of_taking_down", "DEF")
    again.define("twice(Tensor x) -> Tensor")
    torch_private.take_down(again)
    torch_private.take_down(object())


def test_what_is_traced_is_marked_to_be_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> dict[str, object]:
        with torch.fx.traceback.preserve_node_meta():
            graph = torch.fx.Graph()
            before = graph_node(graph)
            with torch_private.kept_for_backward():
                inside = graph_node(graph)
            return {"before": before, "inside": inside, "after": graph_node(graph)}

    def graph_node(graph: torch.fx.Graph) -> object:
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        return tracer.create_node("call_function", torch.sin, (), {}).meta.get("recompute")

    assert traced() == {"before": None, "inside": CheckpointPolicy.MUST_SAVE, "after": None}
    with torch.fx.traceback.preserve_node_meta():
        monkeypatch.setitem(torch.fx.traceback.current_meta, "recompute", CheckpointPolicy.PREFER_RECOMPUTE)
        with torch_private.kept_for_backward():
            pass
        assert torch.fx.traceback.current_meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
    monkeypatch.delattr(torch.fx.traceback, "current_meta")
    with torch_private.kept_for_backward():
        pass


def test_the_least_memory_budget_is_that_of_the_region_or_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("torch._functorch.config")
    assert torch_private.least_memory_budget() == 1.0
    with config.patch(activation_memory_budget=0.5):
        assert torch_private.least_memory_budget() == 0.5
    key = torch_private.found("fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY", None)
    with torch.fx.traceback.preserve_node_meta():
        monkeypatch.setitem(torch.fx.traceback.current_meta, "custom", {key: 0.25})
        assert torch_private.least_memory_budget() == 0.25


def test_a_backward_is_taken_for_granted_where_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_private.may_have_backward()
    seen: list[bool] = []
    make_fx(lambda x: seen.append(torch_private.may_have_backward()) or x + 1)(torch.ones(1))
    assert seen == [True]
    monkeypatch.delattr("torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER")
    assert torch_private.may_have_backward()


def test_a_graph_ends_with_a_reason_and_where_torch_does_not_tell_how_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        torch_private.break_graph("this is why")
        return x + 1

    with pytest.raises(Exception, match="this is why"):
        torch.compile(call, fullgraph=True, backend="eager")(torch.ones(1))
    assert torch.compile(call, backend="eager")(torch.ones(1)) == 2
    torch.compiler.reset()
    monkeypatch.setattr(torch_private, "found", lambda path, fallback: fallback)
    with pytest.raises(UnsupportedError, match="this is why"):
        torch_private.break_graph("this is why")


# --- attention without any of it --------------------------------------------------------------------------------------

LACKING = f"""
import importlib, torch
kept = []
for path in {list({**PRIVATE, **OF_CUDA}.values())!r}:
    *modules, name = path.split(".")
    if modules[0] not in ("_C",):
        importlib.import_module(".".join(["torch", *modules]))
    owner = torch
    for part in modules:
        owner = getattr(owner, part)
    if hasattr(owner, name):
        kept.append((owner, name, getattr(owner, name)))
        delattr(owner, name)
import fa_autotune.ops.torch_private as private
for owner, name, value in kept:  # torch itself needs them
    setattr(owner, name, value)
assert private.make_autograd_impl is None and private.empty_strided_cuda is None

from torch import Tensor
from fa_autotune import UnsupportedError, attention, attention_varlen, flash_attn_qkvpacked_func
from fa_autotune.ops.call import BHSD, BOTTOM_RIGHT, GENERATED, Call

def gradients(function, *inputs):
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

def same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
plain = gradients(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True), q, k, v)
call = Call(None, BOTTOM_RIGHT, BHSD, GENERATED)
same(gradients(lambda *x: attention(*x, causal=True, layout="bhsd"), q, k, v), plain)
same(gradients(lambda *x: torch.ops.fa_autotune.forward(*x, *call)[0], q, k, v), plain)
qkv = torch.stack([q, k, v], 3).detach().transpose(1, 2).contiguous().transpose(2, 3).requires_grad_()
out, d_qkv = gradients(lambda x: flash_attn_qkvpacked_func(x, causal=True).transpose(1, 2), qkv)
same([out, *(part.transpose(1, 2) for part in d_qkv.unbind(2))], plain)
starts = torch.tensor([0, 9], dtype=torch.int32)
rows = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
found = gradients(lambda *x: attention_varlen(*x, starts, starts, causal=True), *rows)
same([x.transpose(0, 1)[None] for x in found], plain)

def twice():
    (gradient,) = torch.autograd.grad(attention(q, k, v, layout="bhsd").sum(), q, create_graph=True)
    gradient.sum().backward()

def forward_mode():
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        attention(torch.autograd.forward_ad.make_dual(q, q), k, v)

for refused in (twice, forward_mode):
    try:
        refused()
    except UnsupportedError as error:
        print(str(error).partition(":")[0])
print("done")
"""


def test_attention_is_served_by_a_torch_that_lacks_all_of_it() -> None:
    """Eagerly, as an operator, stacked and packed; what has no derivative is refused all the same."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LACKING], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "attention has no second derivative",
        "attention has no forward-mode derivative (jvp, dual tensors); use reverse mode, or "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)",
        "done",
    ]


def test_torch_compile_may_make_many_graphs_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("torch._dynamo").config
    with config.patch(cache_size_limit=8):
        torch_private.allow_recompilations(100)
        assert config.cache_size_limit == 100
    monkeypatch.setattr(torch._dynamo, "config", object())
    torch_private.allow_recompilations(100)
