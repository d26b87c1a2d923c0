"""What a release of Triton makes of our kernels that the others don't, as data: tests expect exactly this of it.

A newer release than all of these is expected to do as most do, so that what it makes otherwise is noticed.
"""

import triton

from fa_autotune.space.candidate import Candidate, Variant

THIS_TRITON: tuple[int, int] = tuple(map(int, triton.__version__.split(".")[:2]))  # type: ignore[assignment]

# Defaults and first seeds that a gate stops, by arch, family and variant: a search goes on from others there.
STOPPED_DEFAULTS: dict[tuple[int, int], dict[tuple[str, str, Variant], str]] = {
    (3, 6): {
        ("sm_90", "fwd bf16 d128 window alibi bias loose_mask", Variant.PORTABLE): "score_layout",
        ("sm_90", "fwd bf16 d128 window alibi bias loose_mask", Variant.TMA): "score_layout",
    },
    (3, 8): {
        ("sm_90", "bwd_fused bf16 d128 causal varlen", Variant.HOPPER_WS): "spills",
    },
    (3, 9): {
        ("sm_90", "bwd_dkdv bf16 d256 causal", Variant.TMA): "spills",
        ("sm_90", "fwd bf16 d128 causal bias", Variant.HOPPER_WS): "spills",
    },
}

# What computes the address of an operand anew for each product, so that two loops never share one.
OWN_ADDRESSES = {(3, 8), (3, 9)}

# What spills in the loop of a fused backward of whole blocks (bf16 d64 full, EXACT_LENGTHS).
SPILLS_OF_WHOLE_BLOCKS = {(3, 8)}


def gate_of_default(candidate: Candidate, arch: str) -> str | None:
    """The gate that stops a variant's default, compiled for an arch by this release; None where all let it pass."""
    return STOPPED_DEFAULTS.get(THIS_TRITON, {}).get((arch, candidate.family.label, candidate.variant))
