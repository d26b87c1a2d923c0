"""Kernels with features against the reference, in Triton's interpreter: every pass and variant that serves them."""

from typing import Any

import pytest
import torch

from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from kit.combinations import one_in
from kit.feature_families import FEATURES, TILED, make_family
from kit.scalar_functions import on_python_numbers
from kit.strategies import PLAIN_VARIANTS

pytestmark = pytest.mark.skipif(
    not interpreting(), reason="needs TRITON_INTERPRET=1: on a GPU, test_gpu_features.py runs the same checks"
)

CPU = torch.device("cpu")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2, "num_stages": 1}
# The interpreter takes its time for these: checked where slow tests are asked for, and in test_attn_mask.py and
# test_dropout.py on fewer calls.
SLOW = ("window loose bias alibi", "causal bias softcap dropout")


def named(*slow: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in FEATURES]


EVERY_FEATURE, MOST_FEATURES = named(*SLOW), named(*SLOW, "dropout")


def make_kernel(family: AttentionFamily, variant: Variant = Variant.PORTABLE, **knobs: Any) -> LoadedKernel:
    config = variant_spec(family.kernel_pass, variant).config(**{**SMALL, **knobs})
    return load_kernel(Candidate(family=family, variant=variant, config=config), INTERPRETER.arch)


def failures(family: AttentionFamily, variant: Variant = Variant.PORTABLE, **knobs: Any) -> tuple[str, ...]:
    kernel = make_kernel(family, variant, **knobs)
    config: Any = kernel.candidate.config
    chosen = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=config.EXACT_LENGTHS)
    return verify(kernel, family, chosen, CPU, repeated=False).failures


@pytest.mark.parametrize(
    ("kernel_pass", "variant", "features"), one_in(2, TILED, PLAIN_VARIANTS, EVERY_FEATURE, default=6)
)
@pytest.mark.kernel
@pytest.mark.sampled
def test_passes_every_probe(kernel_pass: Pass, variant: Variant, features: str) -> None:
    assert failures(make_family(kernel_pass, features), variant) == ()


KNOBS: dict[str, dict[str, Any]] = {
    "exact": {"EXACT_LENGTHS": True, "BLOCK_M": 16},
    "pieces": {"BLOCK_M": 16, "BLOCK_N": 32, "HEAD_DIM_PIECE": 16},
}


@pytest.mark.parametrize(
    ("knobs", "kernel_pass", "variant", "features"),
    one_in(5, KNOBS, TILED, PLAIN_VARIANTS, MOST_FEATURES, default=15),
)
def test_every_structural_knob_keeps_the_result(knobs: str, kernel_pass: Pass, variant: Variant, features: str) -> None:
    assert failures(make_family(kernel_pass, features), variant, **KNOBS[knobs]) == ()


@pytest.mark.parametrize(("exact", "features"), one_in(2, [False, True], MOST_FEATURES, default=6))
def test_dk_and_dv_of_different_programs_are_the_same(exact: bool, features: str) -> None:
    family = make_family(Pass.BWD_DKDV, features, head_dim=24, head_dim_v=40)
    assert failures(family, Variant.TMA, SPLIT_OUTPUTS=True, EXACT_LENGTHS=exact, HEAD_DIM_PIECE=16) == ()


FORWARD_KNOBS: dict[str, dict[str, Any]] = {
    "lanes": {"ROW_SUM_LANES": 8, "BLOCK_N": 32},
    "store": {"STORE_BY_TMA": False},
}


@pytest.mark.parametrize(("knobs", "features"), one_in(2, FORWARD_KNOBS, MOST_FEATURES, default=6))
def test_every_knob_of_the_forward_keeps_the_result(knobs: str, features: str) -> None:
    assert failures(make_family(Pass.FWD, features), Variant.TMA, **FORWARD_KNOBS[knobs]) == ()


every_third = pytest.mark.parametrize(("kernel_pass", "features"), one_in(3, TILED, MOST_FEATURES, default=9))


@every_third
def test_tensors_with_any_strides(kernel_pass: Pass, features: str) -> None:
    assert failures(make_family(kernel_pass, features, access=Access.ANY)) == ()


@every_third
def test_fp32_is_computed_in_ieee_precision(kernel_pass: Pass, features: str) -> None:
    assert failures(make_family(kernel_pass, features, DType.FLOAT32, 64), HEAD_DIM_PIECE=32) == ()


# --- which blocks are visited, and which are masked -------------------------------------------------------------------


@pytest.mark.parametrize("right", [None, 0, 3, 20])
@pytest.mark.parametrize("left", [0, 5, 16, 40])
def test_key_blocks_outside_a_window_are_never_visited_and_those_inside_never_masked(
    left: int, right: int | None
) -> None:
    family = make_family(Pass.FWD, "left" if right is None else "window")
    ranges = on_python_numbers(make_kernel(family, BLOCK_M=16).module.key_range, BLOCK_M=16, BLOCK_N=16)
    for seqlen_q, seqlen_k in ((1, 1), (15, 40), (48, 17), (33, 96), (96, 96)):
        offset = seqlen_k - seqlen_q
        unseen = max(0, offset - left)  # a kernel's key 0 is the first that some row sees
        bounds = [*([] if right is None else [offset + right - unseen]), offset - left - unseen]
        for start_m in range(0, seqlen_q, 16):
            full_start, full_end, left_start, num_left, right_start, num_edge = ranges(
                start_m, seqlen_q, seqlen_k - unseen, *bounds
            )
            rows = range(start_m, min(start_m + 16, seqlen_q))
            sees = [
                [row + offset - left <= key and (right is None or key <= row + offset + right) for row in rows]
                for key in range(unseen, seqlen_k)
            ]
            unmasked = list(range(full_start, full_end, 16))
            edges = [left_start + 16 * edge for edge in range(num_left)]
            edges += [right_start + 16 * edge for edge in range(num_edge - num_left)]
            assert len({*unmasked, *edges}) == len(unmasked) + len(edges)
            assert all(all(map(all, sees[block : block + 16])) and block + 16 <= len(sees) for block in unmasked)
            visited = [block for block in range(0, len(sees), 16) if any(map(any, sees[block : block + 16]))]
            assert sorted([*unmasked, *edges]) == visited


@pytest.mark.parametrize("right", [None, 0, 3, 20])
@pytest.mark.parametrize("left", [0, 5, 16, 40])
def test_query_blocks_outside_a_window_are_never_visited_and_those_inside_never_masked(
    left: int, right: int | None
) -> None:
    family = make_family(Pass.BWD_DKDV, "left" if right is None else "window")
    module = make_kernel(family, BLOCK_M=16).module
    span = on_python_numbers(module.query_span, BLOCK_M=16, BLOCK_N=16)
    ranges = on_python_numbers(module.query_range, BLOCK_M=16, BLOCK_N=16, query_span=span)
    for seqlen_q, seqlen_k in ((1, 1), (15, 40), (48, 17), (33, 96), (96, 96)):
        offset = seqlen_k - seqlen_q
        bounds = [*([] if right is None else [offset + right]), offset - left]
        seen_end = seqlen_k if right is None else max(0, min(seqlen_k, seqlen_q + offset + right))
        for start_n in range(0, seen_end, 16):
            full_m, full_stop, first_m, num_first, last_m, num_edge = ranges(
                start_n, seqlen_q // 16 * 16, seqlen_q, seen_end, *bounds
            )
            keys = range(start_n, min(start_n + 16, seen_end))
            sees = [
                [row + offset - left <= key and (right is None or key <= row + offset + right) for key in keys]
                for row in range(seqlen_q)
            ]
            unmasked = list(range(full_m, full_stop, 16))
            edges = [first_m + 16 * edge for edge in range(num_first)]
            edges += [last_m + 16 * edge for edge in range(num_edge - num_first)]
            assert len({*unmasked, *edges}) == len(unmasked) + len(edges)
            assert all(all(map(all, sees[block : block + 16])) and block + 16 <= seqlen_q for block in unmasked)
            needed = {block for block in range(0, seqlen_q, 16) if any(map(any, sees[block : block + 16]))}
            assert needed <= {*unmasked, *edges} <= set(range(0, seqlen_q, 16))
            assert len({*unmasked, *edges} - needed) <= 1  # a block whose rows see keys of the neighbouring block only
