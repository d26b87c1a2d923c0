"""The seed of dropout is drawn once for each call, also where a compiler computes values again in the backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen, scaled_dot_product_attention
from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.seeds import seed_for
from fa_autotune.reference.dropout import draw_seed
from kit.combinations import rest

pytestmark = [
    pytest.mark.usefixtures("reference_only"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # of torch itself
]
functorch_config: Any = pytest.importorskip("torch._functorch.config")
STARTS = torch.tensor([0, 20, 64], dtype=torch.int32)
CALLS = {
    "attention": lambda q, k, v: attention(q, k, v, dropout_p=0.4),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.4
    ).transpose(1, 2),
    "varlen": lambda q, k, v: attention_varlen(q[0], k[0], v[0], STARTS, STARTS, dropout_p=0.4)[None],
}


def model(name: str) -> Any:
    """With values before the call that can be computed again, cheaply or not."""

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = CALLS[name](((q @ weight).relu() @ weight).sin().exp(), k, v)
        return out

    return run


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def keep_nothing(joint_graph: Any, memory: list[float], *others: Any) -> tuple[float, list[int], list[int]]:
    """What a solver of torch's answers, if all that may be computed again is to be."""
    return 0.0, [], [*range(len(memory))]


@pytest.mark.parametrize(
    ("name", "budget", "solves"),
    [("attention", 0.9, True), ("attention", 0.5, True), *((name, 0.05, False) for name in CALLS)],
)
def test_a_memory_budget_changes_no_dropped_weight(
    name: str, budget: float, solves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(v.grad·v).sum() and (d_out·out).sum() are one number, if both directions drop the same weights."""
    if not solves:
        partitioners = pytest.importorskip("torch._functorch.partitioners")
        monkeypatch.setattr(partitioners, "_optimize_runtime_with_given_memory", keep_nothing)
    q, k, v, d_out = torch.randn(4, 1, 64, 4, 32, generator=torch.Generator().manual_seed(1))
    v, weight = v.requires_grad_(), torch.eye(32).requires_grad_()
    with functorch_config.patch(activation_memory_budget=budget):
        graph = torch.compile(model(name), fullgraph=True, backend="aot_eager_decomp_partition")
        for _ in range(2):
            out = graph(q, k, v, weight)
            (dv,) = torch.autograd.grad(out, v, d_out)
            torch.testing.assert_close((dv * v).sum(), (d_out * out).sum(), atol=1e-2, rtol=1e-4)


def test_a_graph_draws_the_seeds_of_eager_calls() -> None:
    q, k, v = torch.randn(3, 1, 64, 4, 32)
    graph = torch.compile(CALLS["attention"], fullgraph=True, backend="aot_eager_decomp_partition")
    for call in (graph, CALLS["attention"]):
        torch.manual_seed(5)
        found = [call(q, k, v), call(q, k, v)]
        assert not torch.equal(*found)
        if call is graph:
            expected = found
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("differentiated", ["v", "weight", *rest(["q", "k"])])
def test_a_graph_that_may_keep_nothing_is_refused_where_it_has_a_backward(differentiated: str) -> None:
    tensors = dict(zip(["q", "k", "v", "weight"], torch.randn(4, 1, 64, 4, 32), strict=True))

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Any:
        return CALLS["attention"](q, k, v) * weight

    with functorch_config.patch(activation_memory_budget=0):
        graph = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
        assert graph(**tensors).shape == tensors["q"].shape
        tensors[differentiated].requires_grad_()
        with torch.no_grad():
            assert graph(**tensors).shape == tensors["q"].shape
        with pytest.raises(Exception, match=r"where torch\.compile keeps nothing of the forward"):
            graph(**tensors)


def test_an_eager_call_draws_from_the_generator_itself() -> None:
    q = torch.randn(1, 8, 2, 16)
    torch.manual_seed(3)
    expected = draw_seed(q.device)
    torch.manual_seed(3)
    assert torch.equal(seed_for(q), expected)
    torch.manual_seed(3)
    assert torch.equal(torch.ops.fa_autotune.seed(q), expected)


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: torch.func.grad(lambda *x: f(*x).sum())])
def test_vmap_refuses_dropout(transform: Any, randomness: str) -> None:
    tensors = torch.randn(3, 2, 1, 8, 4, 32)
    with pytest.raises(UnsupportedError, match="attention with dropout_p has no rule for vmap"):
        torch.vmap(transform(CALLS["attention"]), randomness=randomness)(*tensors)


def test_vmap_of_a_graph_refuses_dropout() -> None:
    tensors = torch.randn(3, 2, 1, 8, 4, 32)
    graph = torch.compile(torch.vmap(CALLS["attention"], randomness="different"), backend="aot_eager")
    with pytest.raises(Exception, match="attention with dropout_p has no rule for vmap"):
        graph(*tensors)
