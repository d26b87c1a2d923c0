"""Kernels of packed sequences against the reference, in Triton's interpreter, and what they compile to."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import verify, verify_sampled
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.kernels.render import render
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from kit.combinations import rest, slow
from kit.feature_families import TILED

interpreted = pytest.mark.skipif(
    not interpreting(), reason="needs TRITON_INTERPRET=1: on a GPU, test_gpu_varlen.py runs the same checks"
)
CPU = torch.device("cpu")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2, "num_stages": 1}
FEATURES: dict[str, dict[str, bool]] = {
    "full": {},
    "causal": {"bounded_right": True},
    "left": {"bounded_left": True},
    "window alibi softcap": {"bounded_left": True, "bounded_right": True, "alibi": True, "softcap": True},
    "alibi sinks": {"alibi": True, "sinks": True},
    "window dropout": {"bounded_left": True, "bounded_right": True, "dropout": True},
}
every_pass = pytest.mark.parametrize("kernel_pass", TILED)
causal_or_not = pytest.mark.parametrize("features", ["full", "causal"])


def make_family(
    kernel_pass: Pass,
    features: str = "causal",
    dtype: DType = DType.BFLOAT16,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    access: Access | None = None,
) -> AttentionFamily:
    known = {name: on for name, on in FEATURES[features].items() if name != "sinks" or kernel_pass is Pass.FWD}
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
        varlen=True,
        **{"bounded_right": False, **known},
    )


def make_candidate(family: AttentionFamily, **knobs: Any) -> Candidate:
    config = variant_spec(family.kernel_pass, Variant.PORTABLE).config(**{**SMALL, **knobs})
    return Candidate(family=family, variant=Variant.PORTABLE, config=config)


def make_kernel(family: AttentionFamily, **knobs: Any) -> LoadedKernel:
    return load_kernel(make_candidate(family, **knobs), INTERPRETER.arch)


def failures(family: AttentionFamily, **knobs: Any) -> tuple[str, ...]:
    kernel = make_kernel(family, **knobs)
    config: Any = kernel.candidate.config
    chosen = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
    return verify(kernel, family, chosen, CPU, repeated=False).failures


# The others run where slow tests are asked for: test_varlen.py draws all combinations of features.
QUICK = [(Pass.FWD, "alibi sinks"), (Pass.BWD_DKDV, "causal"), (Pass.BWD_DQ, "window alibi softcap")]
OTHERS = [(Pass.FWD, "full"), *((one, "window dropout") for one in TILED)]
ALL = [(kernel_pass, features) for kernel_pass in TILED for features in FEATURES]


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("kernel_pass", "features"),
    [*QUICK, *rest(OTHERS), *slow(pair for pair in ALL if pair not in (*QUICK, *OTHERS))],
)
def test_passes_every_probe(kernel_pass: Pass, features: str) -> None:
    """Sequences round the blocks, empty ones, one row or none, and unused rows and unseen keys that hold NaN."""
    assert failures(make_family(kernel_pass, features)) == ()


@interpreted
@pytest.mark.parametrize("kernel_pass", [*rest([Pass.BWD_DKDV]), *slow([Pass.FWD])])
def test_wide_values_in_pieces_and_more_keys_than_rows_in_a_block(kernel_pass: Pass) -> None:
    family = make_family(kernel_pass, "causal", DType.FLOAT16, head_dim=24, head_dim_v=40)
    assert failures(family, BLOCK_M=16, BLOCK_N=32, HEAD_DIM_PIECE=16) == ()


@interpreted
@pytest.mark.parametrize("kernel_pass", [*rest([Pass.BWD_DQ]), *slow([Pass.FWD])])
def test_fp32_with_any_strides(kernel_pass: Pass) -> None:
    assert failures(make_family(kernel_pass, "full", DType.FLOAT32, 24, access=Access.ANY), HEAD_DIM_PIECE=16) == ()


@interpreted
def test_a_kernel_that_reads_on_into_the_next_sequence_is_rejected() -> None:
    family = make_family(Pass.FWD, "full")
    kernel = make_kernel(family)

    def shifted(*values: Any) -> None:
        *head, cu_seqlens_k, scale, diagonal = values
        kernel(*head, torch.cat([cu_seqlens_k[:1], cu_seqlens_k[1:] + 1]), scale, diagonal)

    chosen = probes(family, block_m=32, block_n=16, exact_lengths=False)
    assert any("out" in failure for failure in verify(shifted, family, chosen[:1], CPU, repeated=False).failures)


@interpreted
@every_pass
def test_sampled_checks_see_the_sequences_of_a_problem(kernel_pass: Pass) -> None:
    family = make_family(kernel_pass)
    shape = AttentionShape(batch_size=3, num_q_heads=2, num_kv_heads=1, seqlen_q=20, seqlen_k=24)
    problem = AttentionProblem(family=family, shape=shape)
    workload = seeded_workload(problem, device=CPU, diagonal=0)
    kernel = make_kernel(family)

    def check(run: Any) -> tuple[str, ...]:
        return verify_sampled(run, problem, workload.inputs, workload.softmax_scale, workload.features).failures

    def wrong(*values: Any) -> None:
        kernel(*values)
        output = values[len(workload.inputs)]
        output[:, :, output.shape[2] * 2 // 3 + 3] += 1.0  # a row of the last sequence

    assert check(kernel) == ()
    assert any("batch 2" in failure for failure in check(wrong))


# --- where programs look for their work -------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000, 20_000])
def test_every_block_of_every_sequence_has_one_program(count: int) -> None:
    """The search for a program's sequence, also over more sequences than it looks at together."""
    block = 16
    lengths = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(count))
    lengths[lengths > 30] = 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(starts[-1])
    module = make_kernel(make_family(Pass.FWD, "full"), BLOCK_M=block).module
    (programs, *_) = module.grid(count, 1, total)
    first = starts // block + torch.arange(count + 1)  # of each sequence, and of what lies behind the last one
    needed = -(-lengths // block)
    assert (first[:-1] + needed <= first[1:]).all()
    assert programs == int(first[-1]) + 1
    found = searched(module, starts.to(torch.int32), programs)
    assert torch.equal(found, torch.searchsorted(first, torch.arange(programs), right=True) - 1)


def searched(module: Any, starts: Tensor, programs: int) -> Tensor:
    """What the kernel's own search finds for every program, computed on tensors."""
    lanes, count = 128, len(starts)
    assert module.SEARCH_LANES.value == lanes
    place = torch.arange(programs)
    first, left = torch.zeros_like(place), torch.full_like(place, count)
    while (left > 1).any():
        step = -(-left // lanes)
        candidates = first[:, None] + torch.arange(lanes) * step[:, None]
        inside = torch.arange(lanes) * step[:, None] < left[:, None]
        at = starts[candidates.clamp(max=count - 1)]
        started = inside & (at // module.BLOCK_M.value + candidates <= place[:, None])
        passed = (started.sum(1) - 1).clamp(min=0) * step
        first, left = first + passed, torch.minimum(step, left - passed)
    return first


@interpreted
@pytest.mark.parametrize("starts", [[0, 500, 20], [-7, 3, 30], [5, 2, 9], [0, 2**31 - 1, 2**31 - 1], [40, 40, 40]])
@every_pass
def test_starts_that_make_no_sense_make_no_kernel_touch_other_memory(kernel_pass: Pass, starts: list[int]) -> None:
    family = make_family(kernel_pass)
    shape = AttentionShape(batch_size=2, num_q_heads=2, num_kv_heads=1, seqlen_q=10, seqlen_k=10)
    workload = seeded_workload(AttentionProblem(family=family, shape=shape), device=CPU, diagonal=0)
    wrong = torch.tensor(starts, dtype=torch.int32)
    for q_starts, k_starts in ((wrong, workload.features.cu_seqlens_k), (workload.features.cu_seqlens_q, wrong)):
        spoiled = replace(workload, features=replace(workload.features, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts))
        buffers = [torch.full((3, *output.size), float("nan"), dtype=output.dtype) for output in workload.outputs]
        make_kernel(family)(*spoiled.arguments([buffer[1] for buffer in buffers]))
        assert all(buffer[[0, 2]].isnan().all() for buffer in buffers)


@every_pass
def test_only_the_search_knows_of_sequences_and_no_length_is_an_argument(kernel_pass: Pass) -> None:
    varlen, padded = (render(make_candidate(replace(make_family(kernel_pass), varlen=on))).text for on in (True, False))
    assert "cu_seqlens" in varlen
    assert "seqlen_q," not in varlen.split("KERNEL =")[0].split("def attention_")[1].split("):")[0]
    assert all(word not in padded for word in ("cu_seqlens", "SEARCH_LANES", "total_q"))
