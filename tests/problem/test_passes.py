"""What each pass takes, gives and owns, and that the passes of a way hand on what the later ones take."""

import pytest

from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import (
    BACKWARD_PASSES,
    FUSED_BACKWARD,
    KEYLESS_PASSES,
    SPLIT_BACKWARD,
    TENSORS,
    Element,
    Extent,
    Pass,
)

OF_A_CALL = {"q", "k", "v", "out", "do", "lse"}  # what a backward starts from
GRADIENTS = {"dq", "dk", "dv"}
every_pass = pytest.mark.parametrize("kernel_pass", Pass)


def make_family(kernel_pass: Pass, **features: bool) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass, dtype=DType.BFLOAT16, head_dim=64, head_dim_v=128, bounded_right=False, **features
    )


@every_pass
def test_a_pass_names_tensors_that_are_known_each_once(kernel_pass: Pass) -> None:
    names = (*kernel_pass.spec.takes, *kernel_pass.spec.gives)
    assert set(names) <= TENSORS.keys()
    assert len(set(names)) == len(names)


@every_pass
def test_a_pass_owns_a_tensor_that_it_takes_or_gives(kernel_pass: Pass) -> None:
    assert kernel_pass.spec.owns in (*kernel_pass.spec.takes, *kernel_pass.spec.gives)


@pytest.mark.parametrize("way", [SPLIT_BACKWARD, FUSED_BACKWARD])
def test_a_way_takes_what_a_call_has_or_an_earlier_pass_gave_and_gives_all_gradients(way: tuple[Pass, ...]) -> None:
    known = set(OF_A_CALL)
    for kernel_pass in way:
        assert set(kernel_pass.spec.takes) <= known
        known |= set(kernel_pass.spec.gives)
    assert known >= GRADIENTS


def test_the_forward_gives_what_a_backward_starts_from() -> None:
    assert {*Pass.FWD.spec.takes, *Pass.FWD.spec.gives, "do"} == OF_A_CALL


def test_every_pass_but_the_forward_belongs_to_one_way() -> None:
    assert sorted((Pass.FWD, *BACKWARD_PASSES)) == sorted(Pass)


def test_programs_own_keys_where_they_give_gradients_of_keys() -> None:
    of_keys = {one for one in Pass if any(TENSORS[name].rows is Extent.KEYS for name in one.spec.gives)}
    assert {one for one in Pass if one.spec.owns_keys} == of_keys == {Pass.BWD_DKDV, Pass.BWD_FUSED}


def test_a_pass_without_keys_takes_none_and_has_no_products() -> None:
    for one in KEYLESS_PASSES:
        assert not any(TENSORS[name].rows is Extent.KEYS for name in one.spec.takes)
        assert not one.spec.knows_scores
    assert KEYLESS_PASSES == (Pass.BWD_DELTA, Pass.BWD_PREPROCESS)


def test_statistics_and_what_lies_in_blocks_have_no_strides_of_their_own() -> None:
    assert Pass.FWD.spec.strided == ("q", "k", "v", "out")
    assert Pass.BWD_PREPROCESS.spec.strided == ("out", "do")
    assert Pass.BWD_POSTPROCESS.spec.strided == ("dq",)
    assert not any(TENSORS[name].in_blocks for one in Pass for name in one.spec.strided)


def test_tensors_in_blocks_have_an_element_of_their_own() -> None:
    for name, tensor in TENSORS.items():
        assert not (tensor.in_blocks and tensor.element is Element.OF_CALL), name


@every_pass
def test_a_family_takes_its_passes_tensors_then_its_own_and_numbers_where_there_are_keys(kernel_pass: Pass) -> None:
    has_scores, spec = kernel_pass.spec.knows_scores, kernel_pass.spec
    family = make_family(kernel_pass, alibi=has_scores, dropout=has_scores, varlen=spec.knows_sequences)
    own = ("alibi_slopes", "dropout_seed") if has_scores else ()
    starts = ("cu_seqlens_q", "cu_seqlens_k") if spec.knows_sequences else ()
    assert family.tensors == (*spec.takes, *spec.gives, *own, *starts)
    numbers = ("softmax_scale", "diagonal", *(("dropout_p",) if has_scores else ()))
    assert family.numbers == (numbers if spec.knows_keys else ())


def test_a_masks_gradient_comes_after_dq() -> None:
    family = make_family(Pass.BWD_DQ, bias=True, mask_gradient=True)
    assert family.outputs == ("dq", "d_mask")
    assert family.tensors == ("q", "k", "v", "do", "lse", "delta", "dq", "d_mask", "attn_mask")
