"""Head dims above 256 on a GPU, forward and backward. `pytest -m gpu`; skipped where torch sees no GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.problem.device import parse_triton_version
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import rejection, supported_variants
from fa_autotune.space.seeds import default_config
from kit.attention_calls import assert_gradients_right, assert_right, gradient_of, requiring

pytestmark = pytest.mark.gpu

LENGTHS = [(113, 203), (256, 512), (512, 256), (1023, 1024), (1, 239), (239, 1), (799, 3), (64, 64)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("kernel_pass", [Pass.FWD, Pass.BWD_DELTA, Pass.BWD_DKDV, Pass.BWD_DQ])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v", "access"),
    [
        (DType.BFLOAT16, 512, 512, None),
        (DType.FLOAT16, 320, 320, None),
        (DType.BFLOAT16, 512, 256, None),
        (DType.BFLOAT16, 192, 288, Access.ALIGNED),
        (DType.FLOAT16, 300, 300, None),
        (DType.BFLOAT16, 511, 511, None),
        (DType.FLOAT32, 264, 264, None),
    ],
)
def test_every_variant_passes_its_probes(
    dtype: DType, head_dim: int, head_dim_v: int, access: Access | None, kernel_pass: Pass
) -> None:
    has_keys = kernel_pass is not Pass.BWD_DELTA
    family = AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim if has_keys else head_dim_v,
        head_dim_v=head_dim_v,
        bounded_right=has_keys,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
    )
    device = live_device(0)
    for spec in supported_variants(family, device.arch, parse_triton_version(live_toolchain().triton)):
        config: Any = default_config(spec, family, device.arch)
        candidate = Candidate(family=family, variant=spec.variant, config=config)
        assert rejection(candidate, None, device) is None
        block_n = getattr(config, "BLOCK_N", 16)
        probe_list = probes(family, block_m=config.BLOCK_M, block_n=block_n, exact_lengths=False)
        kernel = load_kernel(candidate, device.arch)
        assert verify(kernel, family, probe_list, torch.device("cuda", 0)).failures == (), spec.variant


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True},
        {"window_size": (100, 20), "softcap": 30.0, "sinks": torch.tensor([0.0, 2.0, -1.0, 5.0])},
    ],
    ids=["full", "causal", "features"],
)
def test_attention_follows_the_numerics_rule(arguments: dict[str, Any]) -> None:
    given = {name: one.cuda() if isinstance(one, Tensor) else one for name, one in arguments.items()}
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = randn(2, seqlen_q, 4, 512), randn(2, seqlen_k, 2, 512), randn(2, seqlen_k, 2, 512)
        with torch.no_grad():
            assert_right(q, k, v, **given)
        assert_gradients_right(q, k, v, **given, factor=3.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # that nothing is accumulated in
def test_a_step_repeats_to_the_bit_on_a_side_stream_compiled_and_captured() -> None:
    static = requiring(*(randn(2, 500, 4, 512) for _ in range(3)))
    d_out = gradient_of(static[0].shape)

    def step(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*tensors, causal=True)
        return out, *torch.autograd.grad(out, tensors, d_out)

    first = step(static)
    for _ in range(20):
        assert all(map(torch.equal, step(static), first))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = step(static)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, beside, first))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True)
    out = compiled(*static)
    assert all(map(torch.equal, (out, *torch.autograd.grad(out, static, d_out)), first))
    static = requiring(*static)  # new leaves: autograd keeps the stream that it first saw of the old ones
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    with torch.no_grad():
        for tensor in static:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(map(torch.equal, captured, step(static)))
