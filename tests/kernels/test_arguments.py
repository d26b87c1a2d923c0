"""The rows of a kernel's arguments: what they name, that modules know what their values read, and what divides them."""

import ast
import builtins
import keyword
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.kernels.arguments import ArgumentRow, argument_rows
from fa_autotune.kernels.modules import candidates_dir, load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import Schedule
from fa_autotune.space.registry import VARIANTS, VariantSpec
from fa_autotune.space.seeds import default_config
from kit.feature_families import make_family
from kit.strategies import candidates

TRITON = (3, 7)
GQA = AttentionShape(batch_size=2, num_q_heads=4, num_kv_heads=2, seqlen_q=130, seqlen_k=200)


def row_named(rows: tuple[ArgumentRow, ...], name: str) -> ArgumentRow:
    (found,) = (row for row in rows if name in row.names)
    return found


def rows_of(kernel_pass: Pass, variant: Variant = Variant.PORTABLE, **fields: Any) -> tuple[ArgumentRow, ...]:
    return argument_rows(make_candidate(kernel_pass, variant, **fields))


def make_candidate(kernel_pass: Pass, variant: Variant, **fields: Any) -> Candidate:
    given_fields = {"dtype": DType.BFLOAT16, "head_dim": 64, "head_dim_v": 64, "bounded_right": False, **fields}
    family = AttentionFamily(kernel_pass=kernel_pass, **given_fields)
    (spec,) = (one for one in VARIANTS if (one.kernel_pass, one.variant) == (kernel_pass, variant))
    return Candidate(family=family, variant=variant, config=default_config(spec, family, "sm_90"))


# --- what rows say ----------------------------------------------------------------------------------------------------


@given(candidate=candidates())
def test_every_argument_has_a_name_of_its_own(candidate: Candidate) -> None:
    names = [name for row in argument_rows(candidate) for name in row.names]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)


def names_read(code: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def names_known(function: ast.FunctionDef, module: ast.Module) -> set[str]:
    """Parameters, local names, those that the module imports or assigns, and Python's own."""
    known = {argument.arg for argument in function.args.args} | set(dir(builtins))
    for node in (*ast.walk(function), *module.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            known.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for target in targets:
            known |= {
                name.id for name in ast.walk(target) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
    return known


def served(candidate: Candidate) -> bool:
    (spec,) = (
        one for one in VARIANTS if (one.kernel_pass, one.variant) == (candidate.family.kernel_pass, candidate.variant)
    )
    return spec.supports(candidate.family, "sm_90", TRITON) is None


@settings(max_examples=60)
@given(candidate=candidates().filter(served))
def test_a_value_reads_only_what_its_module_knows(candidate: Candidate) -> None:
    module = ast.parse(render(candidate).text)
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "arguments")
    returned = function.body[-1]
    assert isinstance(returned, ast.Return)
    assert names_read(returned) <= names_known(function, module)


@settings(max_examples=60)
@given(candidate=candidates())
def test_rows_are_the_kernels_parameters_types_and_divisors(candidate: Candidate) -> None:
    rows, module = argument_rows(candidate), ast.parse(render(candidate).text)
    values = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    signature, alignment = values["SIGNATURE"], ast.literal_eval(values["ALIGNMENT"])
    assert isinstance(signature, ast.Dict)
    keys = [ast.literal_eval(key) for key in signature.keys if key is not None]
    types = dict(zip(keys, map(ast.unparse, signature.values), strict=True))
    assert types == {name: ast.unparse(ast.parse(row.type_literal, mode="eval")) for row in rows for name in row.names}
    for node in module.body:  # what holds of masks
        if isinstance(node, ast.AugAssign):
            alignment |= ast.literal_eval(node.value)
    assert alignment == {name: row.divisor for row in rows for name in row.names if row.divisor}


def families_of(spec: VariantSpec) -> Iterator[tuple[VariantSpec, AttentionFamily]]:
    """A variant with a plain family, packed sequences, and families with features, where it serves them."""
    kernel_pass, names = spec.kernel_pass, ("window", "causal bias softcap dropout", "alibi", "window loose bias alibi")
    found = [make_family(kernel_pass, name, head_dim=192) for name in names if kernel_pass.spec.knows_scores]
    plain = make_candidate(kernel_pass, spec.variant, head_dim=192, head_dim_v=192).family
    found += [plain, replace(plain, varlen=True)] if kernel_pass.spec.knows_sequences else [plain]
    yield from ((spec, family) for family in found if spec.supports(family, "sm_90", TRITON) is None)


SERVED = [case for spec in VARIANTS for case in families_of(spec)]


@pytest.mark.parametrize(("spec", "family"), SERVED, ids=[f"{family.label} {spec.variant}" for spec, family in SERVED])
def test_a_module_gives_a_value_for_each_parameter(spec: VariantSpec, family: AttentionFamily) -> None:
    candidate = Candidate(family=family, variant=spec.variant, config=default_config(spec, family, "sm_90"))
    module = load_module(write_module(render(candidate), candidates_dir()))
    problem = AttentionProblem(family=family, shape=GQA)
    workload = seeded_workload(problem, device=torch.device("cpu"), diagonal=bottom_right_diagonal(problem))
    scratch = (torch.zeros(1, dtype=torch.int32),) if hasattr(module, "SCRATCH_INTS") else ()
    values = module.arguments(*workload.arguments(workload.allocate()), *scratch)
    assert len(values) == len(module.SIGNATURE)


# --- what divides them ------------------------------------------------------------------------------------------------


def test_pointers_and_strides_of_the_aligned_form_are_divided_in_bytes_and_elements() -> None:
    rows = rows_of(Pass.FWD, access=Access.ALIGNED)
    assert row_named(rows, "q_ptr").divisor == 16
    assert row_named(rows, "stride_kn").divisor == 8
    assert row_named(rows, "stride_ob").names == ("stride_ob", "stride_oh", "stride_om")


def test_the_general_form_takes_every_stride_and_knows_of_contiguous_tensors_alone() -> None:
    rows = rows_of(Pass.BWD_DQ, access=Access.ANY)
    assert row_named(rows, "stride_kd").names == ("stride_kb", "stride_kh", "stride_kn", "stride_kd")
    assert [row.names for row in rows if row.divisor] == [("lse_ptr",), ("delta_ptr",)]


def test_sequences_in_a_row_have_no_batch() -> None:
    rows = rows_of(Pass.BWD_DKDV, varlen=True)
    assert row_named(rows, "stride_dkh").names == ("stride_dkh", "stride_dkn")
    assert [row.names[-1] for row in rows][-2:] == ["total_q", "total_k"]


@pytest.mark.parametrize(("loose", "divisor"), [(False, 4), (True, None)])
def test_a_mask_is_read_by_whole_16_bytes_unless_it_is_loose(loose: bool, divisor: int | None) -> None:
    rows = rows_of(Pass.FWD, wide_bias=True, loose_mask=loose)
    assert row_named(rows, "stride_attn_mask_m").divisor == divisor
    assert any("mask_end" in row.names for row in rows) is not loose


# --- where keys are counted from --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel_pass", "value"),
    [
        (Pass.FWD, "left_diagonal - unseen_keys"),
        (Pass.BWD_DQ, "left_diagonal - unseen_keys"),
        (Pass.BWD_DKDV, "left_diagonal"),
    ],
)
def test_keys_before_every_window_are_left_out_where_programs_own_query_rows(kernel_pass: Pass, value: str) -> None:
    rows = rows_of(kernel_pass, bounded_left=True)
    assert row_named(rows, "left_diagonal").value == value
    assert any("unseen_keys" in row.names for row in rows) is not kernel_pass.spec.owns_keys


def test_a_scale_is_in_base_2_unless_something_natural_is_added_to_scores() -> None:
    scales = [row_named(rows_of(Pass.FWD, **{name: True}), "qk_scale").value for name in ("alibi", "bias", "softcap")]
    assert scales == ["softmax_scale * LOG2_E", "softmax_scale", "softcap * LOG2_E"]
    assert row_named(rows_of(Pass.BWD_DQ, alibi=True), "qk_scale").value == "softmax_scale"


def test_a_persistent_kernel_ends_with_its_counter() -> None:
    candidate = make_candidate(Pass.FWD, Variant.HOPPER_WS)
    knobs = {"CONSUMERS": 2, "PACK_P": True}
    persistent = replace(candidate, config=replace(candidate.config, SCHEDULE=Schedule.PERSISTENT, **knobs))
    assert argument_rows(persistent)[-1].names == ("scratch_ptr",)
