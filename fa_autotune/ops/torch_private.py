"""What torch keeps private and is touched all the same, here and nowhere else; each with a fallback where it is absent.

They make a call cheap (allocation, the current GPU, an autograd function's own entry), or tell who looks on while it
runs (transforms, tracing), or set what has no public name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from fa_autotune.errors import UnsupportedError


def found(path: str, fallback: Any) -> Any:
    """What a dotted path leads to from torch, its modules imported; the fallback where it leads nowhere."""
    value: Any = torch
    place = "torch"
    for name in path.split("."):
        place = f"{place}.{name}"
        if not hasattr(value, name):
            try:
                import_module(place)
            except ImportError:
                return fallback
        value = getattr(value, name, None)
        if value is None:
            return fallback
    return value


# --- memory and devices -----------------------------------------------------------------------------------------------

# Allocation as torch's compiled code does it, past the dispatcher; None where torch has none.
empty_strided_cuda: Any = found("_C._dynamo.guards._empty_strided_cuda", None)
current_gpu: Callable[[], int] = found("_C._cuda_getDevice", torch.cuda.current_device)

# --- who looks on -----------------------------------------------------------------------------------------------------

is_transforming: Callable[[], bool] = found("_C._are_functorch_transforms_active", lambda: False)
tracing_state: Callable[[], object | None] = found("_C._get_tracing_state", lambda: None)
is_in_dispatch_mode: Callable[[], bool] = found("utils._python_dispatch.is_in_torch_dispatch_mode", lambda: False)
transforms: Callable[[], Any] = found("_C._functorch.get_interpreter_stack", lambda: None)
is_batched: Callable[[Tensor], bool] = found("_C._functorch.is_legacy_batchedtensor", lambda tensor: False)
unwrap_dead_wrappers: Callable[[tuple[Any, ...]], tuple[Any, ...]] = found(
    "_functorch.utils.unwrap_dead_wrappers", lambda values: values
)
# Of zeros that have no memory, as derivatives of torch's own are.
is_without_memory: Callable[[Tensor], bool] = getattr(Tensor, "_is_zerotensor", lambda tensor: False)
is_fake: Callable[[Any], bool] = found("_subclasses.fake_tensor.is_fake", lambda tensor: False)

_profiler: Any = torch.autograd.profiler
if not hasattr(_profiler, "_is_profiler_enabled"):
    _profiler = SimpleNamespace(_is_profiler_enabled=False)


def is_profiling() -> bool:
    """Whether the profiler records; False where torch does not tell, and calls have no range of their own in it."""
    recording: bool = _profiler._is_profiler_enabled
    return recording


def is_functionalizing() -> bool:
    """Whether one of torch.func's transforms is functionalize, for which autograd functions have no rule."""
    return any(transform.key().name == "Functionalize" for transform in transforms() or ())


# --- autograd ---------------------------------------------------------------------------------------------------------

_forward_ad: Any = torch.autograd.forward_ad
make_autograd_impl: Any = found("_library.autograd.make_autograd_impl", None)
autograd_info: Any = found("_library.autograd.Info", None)


def has_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open; taken for granted where torch does not tell."""
    return getattr(_forward_ad, "_current_level", 0) >= 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor is dual: forward mode asks for its derivative."""
    return _forward_ad.unpack_dual(tensor).tangent is not None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """An autograd function's `apply` for callers that know that no transform is active.

    `Function.apply` unwraps its arguments and looks for transforms first; this is what it calls at last.
    """
    inner: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return inner


# --- operators --------------------------------------------------------------------------------------------------------


def take_down(library: Any) -> None:
    """Undo all that a torch.library.Library defined, where torch knows a way."""
    getattr(library, "_destroy", lambda: None)()


# --- sharded tensors --------------------------------------------------------------------------------------------------


def register_sharding(
    op: Any,
    shardings: Callable[..., list[tuple[list[Any], list[Any]]]],
    is_even: Callable[..., bool],
    first_static: int,
) -> bool:
    """Have DTensor know how an operator's tensors may be sharded; False where torch does not take it as told here.

    `shardings`: of the operator's arguments, tensors as specs: (placements of results, placements of arguments) along
    one dimension of a mesh, None for what is no tensor. `is_even`: of the specs of the tensors among them, as they
    are to lie, and of the arguments: whether that is served. What is no tensor, from `first_static` on, is told apart.
    """
    expand = found("distributed.tensor._ops.utils.expand_to_full_mesh_op_strategy", None)
    schema = found("distributed.tensor._op_schema", None)
    propagator = found("distributed.tensor.DTensor._op_dispatcher.sharding_propagator", None)
    if None in (expand, schema, propagator):
        return False

    def spec_of(argument: Any) -> Any:
        if not isinstance(argument, schema.OpStrategy):
            return argument
        first, *_ = argument.strategies  # how the tensor lies now
        return first.output_spec

    def strategy(called: Any) -> Any:
        arguments = [spec_of(argument) for argument in called.args_schema]
        placements = shardings(*arguments)
        return expand(
            called.get_mesh_from_args(),
            called,
            [[*results, *arguments] for results, arguments in placements],
            input_index=len(op._schema.returns),
            is_valid_strategy_cb=lambda given, results: is_even(given, *arguments),
        )

    propagator.register_op_strategy(op, strategy, schema.RuntimeSchemaInfo(first_static, needs_pytree=True))
    return True


# --- torch.compile ----------------------------------------------------------------------------------------------------


@contextmanager
def kept_for_backward() -> Iterator[None]:
    """Have what is traced meanwhile be kept for the backward by a graph that computes other values again."""
    meta = getattr(found("fx.traceback", None), "current_meta", None)
    if meta is None:
        yield
        return
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        if before is None:
            del meta["recompute"]
        else:
            meta["recompute"] = before


def may_have_backward() -> bool:
    """Whether the graph that torch.compile traces just now has a backward; True where torch does not tell.

    It looks at a call several times, and knows of a backward only when it traces operators one by one, at last. Then a
    graph without one names its inputs so, as does a part of any graph, which is traced for its own.
    """
    tracing = found("fx.experimental.proxy_tensor", None)
    if not hasattr(tracing, "_CURRENT_MAKE_FX_TRACER"):
        return True
    mode, tracer = tracing.get_proxy_mode(), tracing._CURRENT_MAKE_FX_TRACER
    if mode is None:
        return False
    inputs = [node.name for node in mode.tracer.graph.nodes if node.op == "placeholder"]
    return getattr(tracer, "parent_tracer", tracing) is not None or not all(name.startswith("arg") for name in inputs)


def break_graph(reason: str) -> None:
    """Have a graph end here that torch.compile records; where it must be one, torch raises an error with the reason."""
    end = found("_dynamo.graph_break", None)  # loaded, where a graph is recorded
    if end is None:
        raise UnsupportedError(reason)
    end(msg=reason)


def least_memory_budget() -> float:
    """Which share of the values that a backward needs a graph being traced may keep, 1.0 where torch does not tell."""
    budgets = [getattr(found("_functorch.config", None), "activation_memory_budget", 1.0)]
    custom = getattr(found("fx.traceback", None), "current_meta", {}).get("custom")
    key = found("fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY", None)
    if isinstance(custom, dict) and key in custom:
        budgets.append(custom[key])
    return float(min(budgets))


def allow_recompilations(count: int) -> None:
    """Let torch.compile make that many graphs of a function; where torch has no such limit there is none to lift."""
    config = found("_dynamo.config", None)
    if hasattr(config, "cache_size_limit"):
        config.cache_size_limit = count
