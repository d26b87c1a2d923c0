"""`bench` on packed sequences: the same sequences as the batch that its peers get."""

import pytest
import torch
from torch import Tensor

from fa_autotune.benchmark import bench as bench_module
from fa_autotune.benchmark.packed import document_mask, packed
from fa_autotune.benchmark.peers import PEERS
from fa_autotune.dispatch.loaded_kernels import INTERPRETER_INDEX, dispatcher_of
from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.call import GENERATED
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import seeded_inputs
from kit.attention_calls import interpreted

PROBLEM = AttentionProblem.parse("3x2x1x20x24x16,causal,left=9,softcap,alibi,sinks,varlen,fp32")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return seeded_inputs(PROBLEM.family, PROBLEM.shape, device=torch.device("cpu"), seed=0)


@pytest.mark.kernel
@interpreted
def test_ours_gives_what_the_padded_peer_gives() -> None:
    launch, _ = bench_module._ours(dispatcher_of(INTERPRETER_INDEX), PROBLEM, *inputs())
    launch()
    padded, note = PEERS["ours-padded"](PROBLEM, *inputs())
    torch.testing.assert_close(launch.args[3], packed(padded()), atol=1e-5, rtol=1e-5)
    assert note == "our kernels on the same sequences as a batch"


@interpreted
def test_our_backward_gives_what_the_padded_peer_gives() -> None:
    problem = AttentionProblem.parse("2x2x1x20x24x16,causal,varlen,fp32")
    tensors = seeded_inputs(problem.family, problem.shape, device=torch.device("cpu"), seed=0)
    dispatcher = dispatcher_of(INTERPRETER_INDEX)
    torch.manual_seed(0)
    launch, note = bench_module._our_backward(dispatcher, GENERATED, problem, *tensors)
    found = launch()
    assert "bwd_dkdv portable" in note
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = PEERS["ours-padded"](problem, *leaves)[0]()
    torch.manual_seed(0)
    d_out = torch.randn(40, 2, 16).unflatten(0, (2, 20)).transpose(1, 2)
    for one, other in zip(found, torch.autograd.grad(out, leaves, d_out), strict=False):
        torch.testing.assert_close(one.transpose(0, 1)[None], packed(other), atol=1e-4, rtol=1e-4)


def test_a_batch_of_one_length_is_no_problem_for_the_padded_peer() -> None:
    with pytest.raises(UnsupportedError, match="a batch of one length already"):
        PEERS["ours-padded"](AttentionProblem.parse("3x2x1x20x24x16"), *inputs())


def test_the_document_mask_of_flex_attention_is_block_diagonal() -> None:
    problem = AttentionProblem.parse("2x1x1x3x4x16,causal,left=1,varlen")
    rows, keys = torch.arange(6)[:, None], torch.arange(8)[None]
    found = document_mask(problem)(rows, rows, rows, keys)
    one = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(found, torch.block_diag(one, one).bool())
