"""DTensors of batch or heads are attended to shard by shard; others are made whole first."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fa_autotune import attention, attention_varlen
from fa_autotune.errors import UnsupportedError
from fa_autotune.ops import sharding, torch_private
from fa_autotune.ops.call import Extras

distributed = pytest.importorskip("torch.distributed")
tensors = pytest.importorskip("torch.distributed.tensor")
sharded_calls = pytest.importorskip("kit.sharded_calls")
CASES = sharded_calls.CASES
pytestmark = [
    pytest.mark.usefixtures("reference_only"),
    pytest.mark.skipif(not distributed.is_available(), reason="this torch is built without distributed"),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Two devices, of which this process is the first; what it would hear of the other is nothing."""
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
    yield distributed.device_mesh.init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def shards_of(tensor: Tensor, mesh: Any, place: Any) -> Any:
    local = tensor.chunk(2, place.dim)[0] if place.is_shard() else tensor
    return tensors.DTensor.from_local(local.detach().clone(), mesh, [place], run_check=False).requires_grad_()


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rows", "scale")])
def test_each_device_attends_to_its_own_shards(name: str, mesh: Any) -> None:
    """Nothing is exchanged: the local results are those of the local tensors, and so are the gradients."""
    call, given, placements, place = CASES[name]
    sharded = [shards_of(*one) for one in zip(given, [mesh] * len(given), placements, strict=True)]
    local = [tensor.to_local().detach().requires_grad_() for tensor in sharded]
    out = call(*sharded)
    assert out.placements == (place,)
    options = {"alibi_slopes": torch.ones(2), "sinks": local[3]} if name == "sinks" else {}
    expected = attention(*local[:3], **options) if options else call(*local)
    torch.testing.assert_close(out.to_local(), expected)
    d_out = torch.ones_like(expected).cumsum(-1)
    found = torch.autograd.grad(out, sharded, tensors.DTensor.from_local(d_out, mesh, [place], run_check=False))
    for one, other in zip(found, torch.autograd.grad(expected, local, d_out), strict=True):
        torch.testing.assert_close(one.to_local(), other)


@pytest.mark.parametrize("name", ["rows", "scale"])
def test_what_cannot_be_shared_out_so_is_exchanged_first(name: str, mesh: Any) -> None:
    call, given, placements, place = CASES[name]
    out = call(*(shards_of(*one) for one in zip(given, [mesh] * len(given), placements, strict=True)))
    assert (out.placements, out.shape) == ((place,), given[0].shape)


def test_kv_heads_that_do_not_share_out_evenly_stay_together(mesh: Any) -> None:
    q, k, v = torch.randn(1, 8, 6, 16), torch.randn(1, 8, 3, 16), torch.randn(1, 8, 3, 16)
    whole = tensors.Replicate()
    out = attention(shards_of(q, mesh, tensors.Shard(2)), *(shards_of(x, mesh, whole) for x in (k, v)))
    assert out.placements == (whole,)  # type: ignore[attr-defined]


def test_dropout_and_a_mixture_are_refused(mesh: Any) -> None:
    q, k, v = (shards_of(x, mesh, tensors.Shard(0)) for x in sharded_calls.qkv())
    with pytest.raises(UnsupportedError, match="attention of DTensors is not served with dropout_p"):
        attention(q, k, v, dropout_p=0.5)
    with pytest.raises(UnsupportedError, match="some of q, k and v are DTensors and some are not"):
        attention(q.to_local(), k, v)


@pytest.mark.parametrize("name", ["sinks", "attn_mask", "alibi_slopes"])
def test_a_dtensor_beside_plain_tensors_is_named(name: str, mesh: Any) -> None:
    q, k, v = sharded_calls.qkv()
    sizes = {"attn_mask": (q.shape[1], k.shape[1])}
    extra = shards_of(torch.ones(sizes.get(name, (q.shape[2],))), mesh, tensors.Replicate()).detach()
    with pytest.raises(UnsupportedError, match=rf"no DTensors and {name} beside .*full_tensor\(\)"):
        attention(q, k, v, **{name: extra})


def test_a_gradient_of_another_kind_than_its_result_is_named(mesh: Any) -> None:
    q, k, v = (shards_of(x, mesh, tensors.Shard(0)) for x in sharded_calls.qkv())
    out, lse = attention(q, k, v, return_lse=True)
    for name, result in (("out", out), ("lse", lse)):
        with pytest.raises(UnsupportedError, match=f"{name} is a DTensor and its gradient is not; make it one"):
            torch.autograd.grad(result, q, torch.ones(result.shape), retain_graph=True)
    plain = q.to_local().detach().requires_grad_()
    d_out = shards_of(torch.ones(plain.shape), mesh, tensors.Replicate()).detach()
    with pytest.raises(UnsupportedError, match=r"the gradient of out is a DTensor and out is not; .*full_tensor\(\)"):
        torch.autograd.grad(attention(plain, plain, plain), plain, d_out)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
def test_a_graph_takes_plain_tensors_beside_sharded_ones(mesh: Any) -> None:
    q, k, v = (shards_of(x, mesh, tensors.Shard(0)) for x in sharded_calls.qkv())
    sinks = torch.ones(q.shape[2], requires_grad=True)
    graph = torch.compile(lambda *x: attention(*x[:3], sinks=x[3]), fullgraph=True, backend="aot_eager")
    found, expected = graph(q, k, v, sinks), attention(q, k, v, sinks=sinks)
    torch.compiler.reset()
    torch.testing.assert_close(found.to_local(), expected.to_local())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_a_graph_of_sharded_tensors_takes_all_extras(axis: int, mesh: Any) -> None:
    given = sharded_calls.qkv()
    q, k, v = (shards_of(x, mesh, tensors.Shard(axis)) for x in given)
    heads, rows, keys = q.shape[2], q.shape[1], k.shape[1]
    sinks, mask = torch.ones(heads, requires_grad=True), torch.ones(rows, keys).cumsum(1).requires_grad_()
    slopes = shards_of(torch.ones(heads), mesh, tensors.Replicate()).detach()

    def call(*x: Any) -> Any:
        q, k, v, sinks, mask = x
        return attention(
            q, k, v, sinks=sinks, attn_mask=mask, alibi_slopes=slopes, softcap=2.0, window_size=(3, 2), causal=True
        )

    found = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        out = function(q, k, v, sinks, mask)
        d_out = tensors.DTensor.from_local(torch.ones(out.to_local().shape), mesh, out.placements, run_check=False)
        results = [out, *torch.autograd.grad(out, (q, k, v, sinks, mask), d_out)]
        found.append([one.to_local() if sharding.is_sharded(one) else one for one in results])
    torch.compiler.reset()
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: attention(q, k, v, dropout_p=0.5), "attention of DTensors is not served with dropout_p"),
        (lambda q, k, v: attention(q.to_local(), k, v), "some of q, k and v are DTensors and some are not"),
    ],
    ids=["dropout", "a mixture"],
)
def test_an_error_of_one_graph_says_what_is_not_served(call: Any, message: str, mesh: Any) -> None:
    q, k, v = (shards_of(x, mesh, tensors.Shard(0)) for x in sharded_calls.qkv())
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.compiler.reset()


def test_flops_of_packed_sequences_are_counted_by_the_lengths_that_are_whole_on_each_device(mesh: Any) -> None:
    x = shards_of(torch.ones(8, 2, 16), mesh, tensors.Shard(1)).detach()
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    whole = tensors.DTensor.from_local(starts, mesh, [tensors.Replicate()], run_check=False)
    with FlopCounterMode(display=False) as counter:
        attention_varlen(x, x, x, whole, whole)
    assert counter.get_total_flops() == 2 * x.shape[1] * (3 * 3 + 5 * 5) * (16 + 16)


def test_lengths_that_are_shared_out_are_made_whole_once(mesh: Any) -> None:
    """For the shards, for both directions, and for who counts FLOPs by them."""
    x = shards_of(torch.ones(8, 2, 16), mesh, tensors.Shard(1)).detach()
    starts = tensors.DTensor.from_local(torch.zeros(2, dtype=torch.int32), mesh, [tensors.Shard(0)], run_check=False)
    extras = sharding.prepared(x, x, x, Extras(cu_seqlens_q=starts, cu_seqlens_k=starts))
    assert [one.placements for one in extras.given()] == [(tensors.Replicate(),)] * 2  # type: ignore[attr-defined]


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
def test_a_graph_refuses_dropout_of_sharded_tensors_too(mesh: Any) -> None:
    q, k, v = (shards_of(x, mesh, tensors.Shard(0)) for x in sharded_calls.qkv())
    with pytest.raises(UnsupportedError, match="attention of DTensors is not served with dropout_p"):
        torch.compile(lambda *x: attention(*x, dropout_p=0.5), backend="aot_eager")(q, k, v)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
def test_a_graph_of_sharded_tensors_shares_them_out_too(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.compile(lambda *x: attention(*x, causal=True) * 2, fullgraph=True, backend="aot_eager")
    q, k, v = (shards_of(x, mesh, tensors.Shard(0)) for x in sharded_calls.qkv())
    out = graph(q, k, v)
    torch.compiler.reset()
    assert out.placements == (tensors.Shard(0),)
    torch.testing.assert_close(out.to_local(), 2 * attention(*(x.to_local() for x in (q, k, v)), causal=True))


def test_where_there_is_no_dtensor_nothing_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    x = torch.ones(1, 8, 2, 16)
    assert not sharding.is_sharded(x)
    assert not sharding.registered()
    assert sharding.prepared(x, x, x, sharding.NO_EXTRAS) is sharding.NO_EXTRAS


def test_a_torch_that_takes_no_strategy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "found", lambda path, fallback: fallback)
    op = torch.ops.fa_autotune.forward.default
    assert not torch_private.register_sharding(op, lambda *arguments: [], lambda *specs: True, first_static=3)


@pytest.mark.rest
def test_two_processes_compute_what_one_does() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", str(Path(sharded_calls.__file__))]
    processes = [
        subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        printed, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert printed.splitlines() == list(CASES)
