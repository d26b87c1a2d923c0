"""Families with features: which are tested, by name, wherever kernels are compiled or run."""

from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass

TILED = (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ)
FEATURES: dict[str, dict[str, bool]] = {
    "left": {"bounded_left": True},
    "window": {"bounded_left": True, "bounded_right": True},
    "softcap": {"softcap": True},
    "window softcap": {"bounded_left": True, "bounded_right": True, "softcap": True},
    "alibi": {"alibi": True},
    "causal alibi": {"bounded_right": True, "alibi": True},
    "window alibi softcap": {"bounded_left": True, "bounded_right": True, "alibi": True, "softcap": True},
    "sinks": {"sinks": True},
    "window alibi sinks": {"bounded_left": True, "bounded_right": True, "alibi": True, "sinks": True},
    "bool mask": {"bool_mask": True},
    "causal wide bias softcap sinks": {
        **{"bounded_right": True, "softcap": True, "sinks": True},
        **{"wide_bias": True, "mask_gradient": True},
    },
    "window loose bias alibi": {
        **{"bounded_left": True, "bounded_right": True, "alibi": True},
        **{"bias": True, "loose_mask": True, "mask_gradient": True},
    },
    "dropout": {"dropout": True},
    "causal bias softcap dropout": {
        **{"bounded_right": True, "softcap": True, "dropout": True},
        **{"bias": True, "mask_gradient": True},
    },
}
OF_ONE_PASS = {"sinks": Pass.FWD, "mask_gradient": Pass.BWD_DQ}


def fewest_of_all() -> list[str]:
    """Few names, in which every feature is on at least once: again and again one with the most that are new."""
    chosen: list[str] = []
    seen: set[str] = set()
    while missing := {feature for features in FEATURES.values() for feature in features} - seen:
        chosen.append(max(FEATURES, key=lambda name: len(missing & set(FEATURES[name]))))
        seen |= set(FEATURES[chosen[-1]])
    return chosen


def make_family(
    kernel_pass: Pass,
    features: str,
    dtype: DType = DType.BFLOAT16,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    access: Access | None = None,
) -> AttentionFamily:
    """A family of a pass with features by name, those that the pass knows; in fp32 every bias is as wide as q."""
    known = {name: on for name, on in FEATURES[features].items() if OF_ONE_PASS.get(name, kernel_pass) is kernel_pass}
    if dtype is DType.FLOAT32 and known.pop("wide_bias", False):
        known["bias"] = True
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
        **{"bounded_right": False, **known},
    )
