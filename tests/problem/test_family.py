"""Families: keys, passes by name, what goes together, and how they are read."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from fa_autotune.errors import InvalidProblemError
from fa_autotune.problem.family import Access, AttentionFamily, DType, parse_json, strongest_access
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass, parse_passes
from fa_autotune.problem.problem import AttentionProblem
from kit.strategies import families

PLAIN = AttentionFamily(dtype=DType.BFLOAT16, head_dim=64, head_dim_v=64, bounded_right=False)


@given(families())
def test_a_family_survives_its_key(family: AttentionFamily) -> None:
    assert AttentionFamily.from_key(family.key) == family


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("fwd", (Pass.FWD,)),
        ("fwd,bwd", (Pass.FWD, *BACKWARD_PASSES)),
        (" BWD , bwd_dq ", BACKWARD_PASSES),
        ("bwd_dkdv,fwd", (Pass.BWD_DKDV, Pass.FWD)),
    ],
)
def test_passes_are_read_by_name_each_once(text: str, passes: tuple[Pass, ...]) -> None:
    assert parse_passes(text) == passes


@pytest.mark.parametrize("text", ["", "sideways", "fwd,", "fwd;bwd"])
def test_a_word_that_is_no_pass_is_refused(text: str) -> None:
    with pytest.raises(InvalidProblemError, match="is not one of: fwd, bwd, bwd_delta"):
        parse_passes(text)


@given(families())
def test_a_stronger_access_than_the_rows_allow_is_refused(family: AttentionFamily) -> None:
    rows = (family.head_dim * family.dtype.itemsize, family.head_dim_v * family.dtype.itemsize)
    whole = all(row % 16 == 0 for row in rows)
    assert (strongest_access(family.dtype, family.head_dim, family.head_dim_v) is Access.TMA) == whole
    assert whole or family.access is Access.ANY


@pytest.mark.parametrize(("dtype", "itemsize"), [(DType.FLOAT16, 2), (DType.BFLOAT16, 2), (DType.FLOAT32, 4)])
def test_itemsize_is_bytes_per_element(dtype: DType, itemsize: int) -> None:
    assert dtype.itemsize == itemsize


@pytest.mark.parametrize("name", ["softcap", "alibi"])
def test_a_postprocessing_that_names_scores_is_refused(name: str) -> None:
    family = AttentionProblem.parse("1x2x1x64x64x64,causal,bwd_postprocess").family
    with pytest.raises(InvalidProblemError, match=f"{name}=True is not for bwd_postprocess"):
        replace(family, **{name: True})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bounded_right": 1}, "bounded_right=1 is not a bool"),
        ({"kernel_pass": "fwd"}, "kernel_pass='fwd' is not a Pass"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' is not a DType"),
        ({"head_dim": 7}, "head_dim=7 is not an integer from 8 to 512"),
        ({"head_dim_v": 64.0}, "head_dim_v=64.0 is not an integer from 8 to 512"),
        ({"head_dim": 100}, "access=tma needs rows of whole 16 bytes, .* say access=any"),
        ({"bool_mask": True, "bias": True}, "bool_mask and bias are masks of one call, .* leave one out"),
        ({"wide_bias": True, "dtype": DType.FLOAT32}, "in float32 write bias"),
        ({"loose_mask": True}, "loose_mask=True says how a mask lies; add one of bool_mask, bias, wide_bias"),
        ({"mask_gradient": True, "bias": True}, "is for bwd_dq with bias or wide_bias, not fwd; leave it out"),
        ({"mask_gradient": True, "kernel_pass": Pass.BWD_DQ, "bool_mask": True}, "is for bwd_dq with bias"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_rule(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidProblemError, match=says):
        replace(PLAIN, **change)


@pytest.mark.parametrize(
    ("change", "itemsize"),
    [
        ({"bool_mask": True}, 1),
        ({"bias": True}, 2),
        ({"wide_bias": True}, 4),
        ({"bias": True, "dtype": DType.FLOAT32}, 4),
    ],
)
def test_a_mask_of_bools_takes_a_byte_and_numbers_take_what_they_are(change: dict[str, Any], itemsize: int) -> None:
    family = replace(PLAIN, **change)
    assert (family.mask_itemsize, family.has_mask, family.is_shifted) == (itemsize, True, family.has_bias)


def test_a_kernel_takes_the_tensors_and_numbers_of_the_features_that_are_on() -> None:
    everything = dict.fromkeys(("bounded_left", "softcap", "alibi", "sinks", "bias", "dropout"), True)
    family = replace(PLAIN, **everything)
    assert family.feature_tensors == ("alibi_slopes", "sinks", "attn_mask", "dropout_seed")
    assert family.feature_numbers == ("left_diagonal", "softcap", "dropout_p")
    assert (PLAIN.feature_tensors, PLAIN.feature_numbers, PLAIN.length_tensors) == ((), (), ())
    assert replace(PLAIN, varlen=True).length_tensors == ("cu_seqlens_q", "cu_seqlens_k")
    windowed = replace(PLAIN, kernel_pass=Pass.BWD_POSTPROCESS, bounded_left=True)
    assert windowed.feature_numbers == ("left_diagonal", "key_offset")


@pytest.mark.parametrize("other", ["bool_mask", "bias", "wide_bias"])
def test_sequences_in_a_row_with_a_mask_are_no_family(other: str) -> None:
    with pytest.raises(InvalidProblemError, match=f"^{other} with varlen: kernels of packed sequences know no masks"):
        AttentionProblem.parse(f"8x32x8x2048x2048x128,causal,{other},varlen")
    with pytest.raises(InvalidProblemError, match=f"^{other} with varlen: .*; leave one out"):
        replace(PLAIN, kernel_pass=Pass.BWD_DQ, varlen=True, **{other: True})


def test_a_hash_is_kept_but_does_not_travel() -> None:
    """That of a text is another in each process, where an equal family must be found all the same."""
    family = AttentionProblem.parse("1x1x1x64x64x64,causal").family
    assert hash(family) == hash(replace(family)) == family._hash
    for other in (pickle.loads(pickle.dumps(family)), copy.copy(family), replace(family)):
        assert not hasattr(other, "_hash")
        assert {family: 1}[other] == 1


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        "1e999",
        "-1e999",
        '{"a": 1, "a": 1}',
        "[" * 33 + "]" * 33,
        "[" * 10**5,
        "",
        "{",
    ],
    ids=lambda text: text[:12],
)
def test_json_that_is_none_or_that_nobody_writes_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_json_is_parsed_to_its_depth() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "x"]}') == {"a": [1, 2.5, None, True, "x"]}
    assert parse_json("[" * 31 + "1" + "]" * 31)[0][0] is not None
