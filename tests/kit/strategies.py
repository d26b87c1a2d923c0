"""Hypothesis strategies for our dataclasses."""

from dataclasses import replace

from hypothesis import strategies as st

from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import MAX_HEAD_DIM, MIN_HEAD_DIM, Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import FUSED_BACKWARD, KEYLESS_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import VARIANTS, VariantSpec

PLAIN_VARIANTS = (Variant.PORTABLE, Variant.TMA)  # of every pass but delta, and what the interpreter runs


def head_dims(widest: int = MAX_HEAD_DIM) -> st.SearchStrategy[int]:
    """Any head dim; the usual multiples of 8 as often as the others."""
    return st.one_of(
        st.integers(MIN_HEAD_DIM // 8, widest // 8).map(lambda eighth: 8 * eighth),
        st.integers(MIN_HEAD_DIM, widest),
    )


@st.composite
def families(draw: st.DrawFn, kernel_pass: Pass | None = None) -> AttentionFamily:
    """Families of every pass (or one), dtype, pair of head dims and access that go together."""
    drawn_pass = kernel_pass or draw(st.sampled_from(Pass))
    has_keys = drawn_pass not in KEYLESS_PASSES
    has_scores = has_keys and drawn_pass is not Pass.BWD_POSTPROCESS
    dtype, head_dim = draw(st.sampled_from(DType)), draw(head_dims())
    head_dim_v = draw(st.one_of(st.just(head_dim), head_dims())) if has_keys else head_dim
    mask = draw(st.sampled_from([None, "bool_mask", "bias", "wide_bias"])) if has_scores else None
    if mask == "wide_bias" and dtype is DType.FLOAT32:
        mask = "bias"
    is_dropped = has_scores and draw(st.booleans())
    is_bias = mask in ("bias", "wide_bias")
    served = Access if strongest_access(dtype, head_dim, head_dim_v) is Access.TMA else [Access.ANY]
    return AttentionFamily(
        kernel_pass=drawn_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=has_keys and draw(st.booleans()),
        bounded_left=has_keys and draw(st.booleans()),
        softcap=has_scores and draw(st.booleans()),
        alibi=has_scores and draw(st.booleans()),
        sinks=drawn_pass is Pass.FWD and draw(st.booleans()),
        **({mask: True} if mask else {}),
        loose_mask=mask is not None and draw(st.booleans()),
        mask_gradient=is_bias and drawn_pass is Pass.BWD_DQ and draw(st.booleans()),
        dropout=is_dropped,
        varlen=has_keys and mask is None and not is_dropped and draw(st.booleans()),
        tf32=has_keys and dtype is DType.FLOAT32 and max(head_dim, head_dim_v) <= 256 and draw(st.booleans()),
        access=draw(st.sampled_from(served)),
        unordered=drawn_pass is Pass.BWD_FUSED and draw(st.booleans()),
    )


@st.composite
def shapes(draw: st.DrawFn, *, max_seqlen: int = 2**20) -> AttentionShape:
    """Shapes with whole GQA groups and a window; lengths of q and k are independent."""
    num_kv_heads = draw(st.integers(1, 32))
    return AttentionShape(
        batch_size=draw(st.integers(1, 512)),
        num_q_heads=num_kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=num_kv_heads,
        seqlen_q=draw(st.integers(1, max_seqlen)),
        seqlen_k=draw(st.integers(1, max_seqlen)),
        window_left=draw(st.integers(0, max_seqlen)),
        window_right=draw(st.sampled_from([0, draw(st.integers(0, max_seqlen))])),
    )


def fitting(family: AttentionFamily, shape: AttentionShape) -> AttentionProblem:
    """The problem of a family and a shape, whose window keeps the sides that the family bounds."""
    left, right = shape.window_left * family.bounded_left, shape.window_right * family.bounded_right
    return AttentionProblem(family=family, shape=replace(shape, window_left=left, window_right=right))


@st.composite
def problems(draw: st.DrawFn, *, max_seqlen: int = 2**20) -> AttentionProblem:
    """Any family with any shape that it knows."""
    family, shape = draw(families()), draw(shapes(max_seqlen=max_seqlen))
    if family.kernel_pass in KEYLESS_PASSES:
        shape = replace(shape, num_kv_heads=shape.num_q_heads, seqlen_k=shape.seqlen_q)
    return fitting(family, shape)


def served_everywhere(**limits: int) -> st.SearchStrategy[AttentionProblem]:
    """Problems that some kernel serves on every device: a fused backward has its own on Hopper, for some families, and
    gradients of wide heads take more shared memory than some GPUs have."""

    def is_served(problem: AttentionProblem) -> bool:
        family = problem.family
        has_operands = family.kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ)
        return family.kernel_pass not in FUSED_BACKWARD and not (
            has_operands and max(family.head_dim, family.head_dim_v) > 256
        )

    return problems(**limits).filter(is_served)


@st.composite
def specs_and_families(draw: st.DrawFn) -> tuple[VariantSpec, AttentionFamily]:
    """One of the registered variants, with a family of its pass."""
    spec = draw(st.sampled_from(VARIANTS))
    return spec, draw(families(spec.kernel_pass))


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """A point of a variant's search space for any family of its pass, constraints not yet asked."""
    spec, family = draw(specs_and_families())
    config = spec.config(**{knob.name: draw(st.sampled_from(knob.values)) for knob in spec.knobs})
    return Candidate(family=family, variant=spec.variant, config=config)


def devices() -> st.SearchStrategy[DeviceSpec]:
    """One of the known GPUs."""
    return st.sampled_from(list(KNOWN_DEVICES.values()))


def json_values() -> st.SearchStrategy[object]:
    """Whatever JSON can hold, NaN included."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )
