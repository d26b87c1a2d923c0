"""Hypothesis strategies for our dataclasses."""

from hypothesis import strategies as st

from fa_autotune.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    Access,
    AttentionFamily,
    AttentionProblem,
    AttentionShape,
    DType,
    strongest_access,
)
from fa_autotune.records import Candidate
from fa_autotune.variants import VARIANTS, VariantSpec


def head_dims() -> st.SearchStrategy[int]:
    """Any head dim; the usual multiples of 8 as often as the others."""
    return st.one_of(
        st.integers(MIN_HEAD_DIM // 8, MAX_HEAD_DIM // 8).map(lambda eighth: 8 * eighth),
        st.integers(MIN_HEAD_DIM, MAX_HEAD_DIM),
    )


@st.composite
def families(draw: st.DrawFn) -> AttentionFamily:
    """Families of every dtype, pair of head dims and access that go together."""
    dtype, head_dim = draw(st.sampled_from(DType)), draw(head_dims())
    head_dim_v = draw(st.one_of(st.just(head_dim), head_dims()))
    served = Access if strongest_access(dtype, head_dim, head_dim_v) is Access.TMA else [Access.ANY]
    return AttentionFamily(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=draw(st.booleans()),
        access=draw(st.sampled_from(served)),
    )


@st.composite
def shapes(draw: st.DrawFn, *, max_seqlen: int = 2**20) -> AttentionShape:
    """Shapes with whole GQA groups; lengths of q and k are independent."""
    num_kv_heads = draw(st.integers(1, 32))
    return AttentionShape(
        batch_size=draw(st.integers(1, 512)),
        num_q_heads=num_kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=num_kv_heads,
        seqlen_q=draw(st.integers(1, max_seqlen)),
        seqlen_k=draw(st.integers(1, max_seqlen)),
    )


def problems(*, max_seqlen: int = 2**20) -> st.SearchStrategy[AttentionProblem]:
    """Any family with any shape."""
    return st.builds(AttentionProblem, family=families(), shape=shapes(max_seqlen=max_seqlen))


def variant_specs() -> st.SearchStrategy[VariantSpec]:
    """One of the registered variants."""
    return st.sampled_from(VARIANTS)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """A point of a variant's search space for any family, constraints not yet asked."""
    spec = draw(variant_specs())
    config = spec.config_type(**{knob.name: draw(st.sampled_from(knob.values)) for knob in spec.knobs})
    return Candidate(family=draw(families()), variant=spec.variant, config=config)


def devices() -> st.SearchStrategy[DeviceSpec]:
    """One of the known GPUs."""
    return st.sampled_from(list(KNOWN_DEVICES.values()))


def json_values() -> st.SearchStrategy[object]:
    """Whatever JSON can hold, NaN included."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )
