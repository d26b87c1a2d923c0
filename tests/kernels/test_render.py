"""Rendering: golden files, identity, features that leave no trace when off, and what may reach a template."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from itertools import dropwhile
from pathlib import Path

import jinja2.meta
import jinja2.nodes
import pytest
from hypothesis import given, settings

from fa_autotune.errors import InvalidConfigError, InvalidProblemError, TemplateError
from fa_autotune.kernels import render as render_module
from fa_autotune.kernels.render import DIGEST_CHARACTERS, KernelSource, render
from fa_autotune.paths import templates_dir
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import BwdDeltaConfig, Schedule, TmaFwdConfig
from fa_autotune.space.registry import VARIANTS, VariantSpec, variant_spec
from kit.strategies import candidates

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
UPDATE_VARIABLE = "FA_AUTOTUNE_UPDATE_GOLDEN"
HEADER_LINES = 4  # beside a legend
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
HOPPER_TILE = {"SCHEDULE": Schedule.TILE, "CONSUMERS": 2, "BLOCK_N": 64}


def make_family(
    dtype: DType = DType.BFLOAT16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    access: Access | None = None,
    **features: bool,
) -> AttentionFamily:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return AttentionFamily(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
        **features,
    )


def make_backward(kernel_pass: Pass, variant: Variant, family: AttentionFamily, **knobs: int | bool) -> Candidate:
    spec = variant_spec(kernel_pass, variant)
    tile = {**TILE, "BLOCK_M": 32} if spec.config_type is BwdDeltaConfig else TILE
    own = {name: value for name, value in tile.items() if name in {field.name for field in fields(spec.config_type)}}
    config = spec.config(**{**own, **knobs})
    return Candidate(family=replace(family, kernel_pass=kernel_pass), variant=variant, config=config)


def make_fused(
    family: AttentionFamily, *, variant: Variant = Variant.HOPPER_WS, unordered: bool = False, **knobs: int | bool
) -> Candidate:
    candidate = make_backward(Pass.BWD_FUSED, variant, family, **knobs)
    return replace(candidate, family=replace(candidate.family, unordered=unordered))


def make_candidate(variant: Variant, family: AttentionFamily | None = None, **knobs: object) -> Candidate:
    tile = HOPPER_TILE if variant is Variant.HOPPER_WS else TILE
    config = variant_spec(Pass.FWD, variant).config(**{**tile, **knobs})  # type: ignore[arg-type]
    return Candidate(family=family or make_family(), variant=variant, config=config)


def first_candidate(spec: VariantSpec) -> Candidate:
    """One of a variant, at a head dim that every pass and variant knows."""
    if spec.kernel_pass is Pass.FWD:
        return make_candidate(spec.variant, make_family(head_dim=256))
    return make_backward(spec.kernel_pass, spec.variant, make_family(head_dim=256))


GOLDEN_CASES = {
    "fwd_portable/bf16_d64_full": make_candidate(Variant.PORTABLE),
    "fwd_portable/bf16_d64_full_exact": make_candidate(Variant.PORTABLE, EXACT_LENGTHS=True),
    "fwd_portable/bf16_d64_causal_row_sums": make_candidate(
        Variant.PORTABLE, make_family(causal=True), ROW_SUM_LANES=8, HEADS_PER_GROUP=1
    ),
    "fwd_portable/fp16_d96_causal_exact": make_candidate(
        Variant.PORTABLE, make_family(DType.FLOAT16, 96, causal=True), EXACT_LENGTHS=True
    ),
    "fwd_portable/bf16_d59_causal_any": make_candidate(Variant.PORTABLE, make_family(head_dim=59, causal=True)),
    "fwd_portable/fp32_d64_causal_pieces": make_candidate(
        Variant.PORTABLE, make_family(DType.FLOAT32, 64, causal=True), BLOCK_M=32, BLOCK_N=16, HEAD_DIM_PIECE=32
    ),
    "fwd_portable/bf16_d192_v128_causal_maxnreg": make_candidate(
        Variant.PORTABLE, make_family(head_dim=192, head_dim_v=128, causal=True), maxnreg=168, num_warps=8, BLOCK_M=128
    ),
    "fwd_tma/bf16_d64_full": make_candidate(Variant.TMA),
    "fwd_tma/bf16_d64_full_exact": make_candidate(Variant.TMA, EXACT_LENGTHS=True),
    "fwd_tma/bf16_d128_causal": make_candidate(Variant.TMA, make_family(head_dim=128, causal=True)),
    "fwd_tma/bf16_d96_causal_store_by_pointers": make_candidate(
        Variant.TMA, make_family(head_dim=96, causal=True), STORE_BY_TMA=False
    ),
    "fwd_tma/fp16_d40_full_exact_store_by_pointers": make_candidate(
        Variant.TMA, make_family(DType.FLOAT16, 40), STORE_BY_TMA=False, EXACT_LENGTHS=True, ROW_SUM_LANES=8
    ),
    "fwd_hopper_ws/bf16_d64_full_single": make_candidate(
        Variant.HOPPER_WS, SCHEDULE=Schedule.SINGLE, CONSUMERS=1, BLOCK_N=128
    ),
    "fwd_hopper_ws/bf16_d96_causal_tile_ping_pong": make_candidate(
        Variant.HOPPER_WS, make_family(head_dim=96, causal=True), CONSUMERS=3, PING_PONG=True
    ),
    "fwd_hopper_ws/fp16_d128_v192_full_persistent_exact": make_candidate(
        Variant.HOPPER_WS,
        make_family(DType.FLOAT16, 128, 192),
        SCHEDULE=Schedule.PERSISTENT,
        PACK_P=False,
        EXACT_LENGTHS=True,
    ),
    "fwd_hopper_ws/bf16_d128_causal_pipelined": make_candidate(
        Variant.HOPPER_WS, make_family(head_dim=128, causal=True), SCHEDULE=Schedule.PIPELINED, BLOCK_N=128
    ),
    "bwd_delta_portable/bf16_d64": make_backward(Pass.BWD_DELTA, Variant.PORTABLE, make_family()),
    "bwd_delta_portable/bf16_d59_any": make_backward(Pass.BWD_DELTA, Variant.PORTABLE, make_family(head_dim=59)),
    "bwd_dkdv_portable/bf16_d64_causal": make_backward(Pass.BWD_DKDV, Variant.PORTABLE, make_family(causal=True)),
    "bwd_dkdv_portable/fp32_d59_full_any_pieces": make_backward(
        Pass.BWD_DKDV, Variant.PORTABLE, make_family(DType.FLOAT32, 59), BLOCK_M=16, BLOCK_N=32, HEAD_DIM_PIECE=32
    ),
    "bwd_dkdv_tma/bf16_d128_causal_exact": make_backward(
        Pass.BWD_DKDV, Variant.TMA, make_family(head_dim=128, causal=True), EXACT_LENGTHS=True
    ),
    "bwd_dkdv_tma/bf16_d256_causal_split": make_backward(
        Pass.BWD_DKDV, Variant.TMA, make_family(head_dim=256, causal=True), SPLIT_OUTPUTS=True
    ),
    "bwd_dq_portable/bf16_d96_causal": make_backward(
        Pass.BWD_DQ, Variant.PORTABLE, make_family(head_dim=96, causal=True)
    ),
    "bwd_dq_tma/bf16_d192_v128_causal": make_backward(
        Pass.BWD_DQ, Variant.TMA, make_family(head_dim=192, head_dim_v=128, causal=True)
    ),
    "bwd_preprocess_portable/bf16_d64": make_backward(Pass.BWD_PREPROCESS, Variant.PORTABLE, make_family()),
    "bwd_preprocess_portable/fp16_d40_any": make_backward(
        Pass.BWD_PREPROCESS, Variant.PORTABLE, make_family(DType.FLOAT16, 40, access=Access.ANY), BLOCK_M=128
    ),
    "bwd_fused_hopper_ws/bf16_d128_causal": make_fused(make_family(head_dim=128, causal=True)),
    "bwd_fused_hopper_ws/fp16_d96_v128_causal_diagonal_first_exact": make_fused(
        make_family(DType.FLOAT16, 96, 128, causal=True), DIAGONAL_FIRST=True, SCORES_EARLY=True, EXACT_LENGTHS=True
    ),
    "bwd_fused_hopper_ws/bf16_d64_full_unordered": make_fused(make_family(), unordered=True),
    "bwd_fused_hopper_ws/bf16_d64_full_exact": make_fused(make_family(), EXACT_LENGTHS=True, HEADS_PER_GROUP=1),
    "bwd_fused_hopper_wide/bf16_d256_causal_diagonal_first": make_fused(
        make_family(head_dim=256, causal=True), variant=Variant.HOPPER_WIDE, HEADS_PER_GROUP=2, DIAGONAL_FIRST=True
    ),
    "bwd_fused_hopper_wide/fp16_d192_v128_full_unordered_exact": make_fused(
        make_family(DType.FLOAT16, 192, 128),
        variant=Variant.HOPPER_WIDE,
        unordered=True,
        DO_STAGES=2,
        DQ_STAGES=1,
        EXACT_LENGTHS=True,
    ),
    "bwd_postprocess_portable/bf16_d192_full": make_backward(
        Pass.BWD_POSTPROCESS, Variant.PORTABLE, make_family(head_dim=192)
    ),
    "bwd_postprocess_portable/bf16_d128_causal": make_backward(
        Pass.BWD_POSTPROCESS, Variant.PORTABLE, make_family(head_dim=128, causal=True)
    ),
    "bwd_postprocess_portable/fp16_d40_full_any": make_backward(
        Pass.BWD_POSTPROCESS, Variant.PORTABLE, make_family(DType.FLOAT16, 40, access=Access.ANY)
    ),
    "fwd_portable/bf16_d64_left": make_candidate(Variant.PORTABLE, make_family(bounded_left=True)),
    "fwd_tma/bf16_d128_window": make_candidate(Variant.TMA, make_family(head_dim=128, causal=True, bounded_left=True)),
    "bwd_dkdv_portable/bf16_d64_window": make_backward(
        Pass.BWD_DKDV, Variant.PORTABLE, make_family(causal=True, bounded_left=True)
    ),
    "bwd_dkdv_tma/bf16_d256_left_split": make_backward(
        Pass.BWD_DKDV, Variant.TMA, make_family(head_dim=256, bounded_left=True), SPLIT_OUTPUTS=True
    ),
    "bwd_dq_tma/bf16_d64_window": make_backward(Pass.BWD_DQ, Variant.TMA, make_family(causal=True, bounded_left=True)),
    "fwd_portable/bf16_d64_causal_softcap": make_candidate(Variant.PORTABLE, make_family(causal=True, softcap=True)),
    "bwd_dkdv_portable/bf16_d64_full_softcap": make_backward(
        Pass.BWD_DKDV, Variant.PORTABLE, make_family(softcap=True)
    ),
    "bwd_dq_tma/bf16_d64_window_softcap": make_backward(
        Pass.BWD_DQ, Variant.TMA, make_family(causal=True, bounded_left=True, softcap=True)
    ),
    "fwd_portable/bf16_d64_causal_alibi_sinks": make_candidate(
        Variant.PORTABLE, make_family(causal=True, alibi=True, sinks=True), ROW_SUM_LANES=8
    ),
    "fwd_hopper_ws/bf16_d128_window_softcap_sinks": make_candidate(
        Variant.HOPPER_WS,
        make_family(head_dim=128, causal=True, bounded_left=True, softcap=True, sinks=True),
        SCHEDULE=Schedule.PIPELINED,
    ),
    "fwd_hopper_ws/bf16_d64_full_alibi_exact": make_candidate(
        Variant.HOPPER_WS, make_family(alibi=True), SCHEDULE=Schedule.PERSISTENT, EXACT_LENGTHS=True
    ),
    "fwd_hopper_ws/bf16_d64_left_single": make_candidate(
        Variant.HOPPER_WS, make_family(bounded_left=True), SCHEDULE=Schedule.SINGLE, CONSUMERS=1
    ),
    "fwd_hopper_ws/bf16_d128_causal_bias_dropout": make_candidate(
        Variant.HOPPER_WS, make_family(head_dim=128, causal=True, bias=True, dropout=True), SCHEDULE=Schedule.PIPELINED
    ),
    "fwd_hopper_ws/bf16_d64_full_bool_mask": make_candidate(
        Variant.HOPPER_WS, make_family(bool_mask=True), SCHEDULE=Schedule.SINGLE, CONSUMERS=1
    ),
    "fwd_hopper_ws/bf16_d64_full_wide_loose_exact": make_candidate(
        Variant.HOPPER_WS,
        make_family(wide_bias=True, loose_mask=True),
        SCHEDULE=Schedule.PERSISTENT,
        EXACT_LENGTHS=True,
    ),
    "fwd_tma/bf16_d64_full_sinks": make_candidate(Variant.TMA, make_family(sinks=True)),
    "bwd_dkdv_tma/bf16_d64_causal_alibi": make_backward(
        Pass.BWD_DKDV, Variant.TMA, make_family(causal=True, alibi=True)
    ),
    "bwd_dq_portable/bf16_d64_window_alibi_softcap": make_backward(
        Pass.BWD_DQ, Variant.PORTABLE, make_family(causal=True, bounded_left=True, alibi=True, softcap=True)
    ),
    "fwd_portable/bf16_d64_causal_varlen": make_candidate(Variant.PORTABLE, make_family(causal=True, varlen=True)),
    "fwd_portable/bf16_d59_left_alibi_sinks_any_varlen": make_candidate(
        Variant.PORTABLE, make_family(head_dim=59, bounded_left=True, alibi=True, sinks=True, varlen=True)
    ),
    "bwd_dkdv_portable/bf16_d64_window_varlen": make_backward(
        Pass.BWD_DKDV, Variant.PORTABLE, make_family(causal=True, bounded_left=True, varlen=True)
    ),
    "bwd_dq_portable/bf16_d64_full_varlen": make_backward(Pass.BWD_DQ, Variant.PORTABLE, make_family(varlen=True)),
    "bwd_dq_tma/bf16_d64_full_exact": make_backward(Pass.BWD_DQ, Variant.TMA, make_family(), EXACT_LENGTHS=True),
    "bwd_fused_hopper_ws/bf16_d128_window": make_fused(make_family(head_dim=128, causal=True, bounded_left=True)),
    "bwd_fused_hopper_ws/fp16_d64_causal_softcap_diagonal_first": make_fused(
        make_family(DType.FLOAT16, causal=True, softcap=True), DIAGONAL_FIRST=True
    ),
    "bwd_fused_hopper_ws/bf16_d64_left_softcap": make_fused(make_family(bounded_left=True, softcap=True)),
    "bwd_fused_hopper_ws/bf16_d128_left_unordered_exact": make_fused(
        make_family(head_dim=128, bounded_left=True), unordered=True, EXACT_LENGTHS=True
    ),
    "bwd_fused_hopper_wide/bf16_d256_window_softcap": make_fused(
        make_family(head_dim=256, causal=True, bounded_left=True, softcap=True), variant=Variant.HOPPER_WIDE
    ),
    "bwd_fused_hopper_ws/bf16_d128_causal_alibi": make_fused(make_family(head_dim=128, causal=True, alibi=True)),
    "bwd_fused_hopper_ws/fp16_d64_causal_softcap_dropout": make_fused(
        make_family(DType.FLOAT16, causal=True, softcap=True, dropout=True)
    ),
    "bwd_fused_hopper_wide/bf16_d192_causal_alibi_dropout": make_fused(
        make_family(head_dim=192, causal=True, alibi=True, dropout=True), variant=Variant.HOPPER_WIDE
    ),
    "bwd_postprocess_portable/bf16_d128_window": make_backward(
        Pass.BWD_POSTPROCESS, Variant.PORTABLE, make_family(head_dim=128, causal=True, bounded_left=True)
    ),
    "bwd_postprocess_portable/bf16_d192_left": make_backward(
        Pass.BWD_POSTPROCESS, Variant.PORTABLE, make_family(head_dim=192, bounded_left=True)
    ),
    "fwd_portable/bf16_d300_causal_any_parts": make_candidate(
        Variant.PORTABLE, make_family(head_dim=300, causal=True, access=Access.ANY), BLOCK_N=16
    ),
    "fwd_tma/bf16_d512_full_parts": make_candidate(
        Variant.TMA, make_family(head_dim=512), BLOCK_N=32, HEAD_DIM_PIECE=128
    ),
    "fwd_portable/fp32_d64_causal_tf32": make_candidate(
        Variant.PORTABLE, replace(make_family(DType.FLOAT32, 64, causal=True), tf32=True), BLOCK_N=32
    ),
}

cases = pytest.mark.parametrize("case", GOLDEN_CASES)


def body_of(source: KernelSource) -> str:
    return "".join(dropwhile(lambda line: line.startswith("#"), source.text.splitlines(keepends=True)))


def legend_of(source: KernelSource) -> list[str]:
    """The lines of a header that say what words mean."""
    header = source.text.removesuffix(body_of(source)).splitlines()
    return header[HEADER_LINES + 1 :]


def kernel_of(source: KernelSource) -> str:
    """The kernel function alone, without the module's host side."""
    tree = ast.parse(source.text)
    (kernel,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "attention_fwd")
    return ast.unparse(kernel)


# --- golden files -----------------------------------------------------------------------------------------------------


@cases
def test_a_render_equals_its_golden_file(case: str) -> None:
    path, text = GOLDEN / f"{case}.py", render(GOLDEN_CASES[case]).text
    if os.environ.get(UPDATE_VARIABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{UPDATE_VARIABLE}=1 rewrites the golden files; read the diff before committing"


def test_there_is_no_golden_file_without_a_case() -> None:
    assert {path.relative_to(GOLDEN).with_suffix("").as_posix() for path in GOLDEN.rglob("*.py")} == set(GOLDEN_CASES)


def test_golden_files_keep_our_lint_rules(checkout: Path) -> None:
    pytest.importorskip("ruff", reason="needs ruff")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", GOLDEN]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- what is rendered -------------------------------------------------------------------------------------------------


def unused_names(text: str) -> set[str]:
    """Local names that a function assigns or takes and never reads; a name of underscores says so on purpose."""
    unused: set[str] = set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            taken = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            unused |= {f"{function.name}.{name}" for name in (stored | taken) - read if name.strip("_")}
    return unused


@cases
def test_a_render_has_no_unused_names(case: str) -> None:
    shared = {  # that all kernels have
        "arguments.diagonal",
        "arguments.turns",
        "attention_fwd.seqlen_k",
        "attention_bwd_dq.seqlen_k",
    }
    assert unused_names(render(GOLDEN_CASES[case]).text) <= shared


@settings(max_examples=60)
@given(candidate=candidates())
def test_every_candidate_renders_as_python_of_its_own_digest(candidate: Candidate) -> None:
    source = render(candidate)
    ast.parse(source.text)
    assert source.name == f"{candidate.family.kernel_pass}_{source.digest}"


@settings(max_examples=30)
@given(candidate=candidates())
def test_the_signature_names_the_kernels_parameters_in_order(candidate: Candidate) -> None:
    tree = ast.parse(render(candidate).text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    kernel = functions[f"attention_{candidate.family.kernel_pass}"]
    parameters = [argument.arg for argument in kernel.args.args]
    signature = assigned["SIGNATURE"]
    assert isinstance(signature, ast.Dict)
    assert [ast.literal_eval(key) for key in signature.keys if key is not None] == parameters
    assert set(ast.literal_eval(assigned["ALIGNMENT"])) <= set(parameters)


@settings(max_examples=20)
@given(candidate=candidates())
def test_rendering_twice_gives_the_same_bytes(candidate: Candidate) -> None:
    assert render(candidate) == render(candidate)


def test_another_hash_seed_gives_the_same_bytes(checkout: Path) -> None:
    """Nothing of a render depends on the order of a set."""
    program = (
        "import test_render as t\n"
        "print(*(t.render(candidate).digest for candidate in t.GOLDEN_CASES.values()), sep='\\n')"
    )
    environ = {
        **os.environ,
        "PYTHONHASHSEED": "4711",
        "PYTHONPATH": os.pathsep.join([str(checkout), "tests", "tests/kernels"]),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [render(candidate).digest for candidate in GOLDEN_CASES.values()]


def test_the_header_names_template_family_and_config() -> None:
    candidate = make_candidate(Variant.TMA)
    header = "\n".join(render(candidate).text.splitlines()[:HEADER_LINES])
    assert "templates/fwd_tma.py.jinja" in header
    assert candidate.family.key in header
    assert '"STORE_BY_TMA":true' in header


GLUON_CASES = [case for case, candidate in GOLDEN_CASES.items() if candidate.variant.is_gluon]


@pytest.mark.parametrize("case", GLUON_CASES)
def test_the_header_of_a_kernel_in_gluon_says_what_its_own_words_mean(case: str) -> None:
    source = render(GOLDEN_CASES[case])
    terms = [term for line in legend_of(source) for term in re.findall(r"^# (\w.*?)(?:  |$)", line)]
    words = {word for term in terms for word in term.split(", ")}
    assert {"tile", "filled"} <= words
    assert {word for word in words if word not in body_of(source)} == set()


def test_other_headers_say_what_a_kernel_is_and_no_more() -> None:
    sources = [render(candidate) for case, candidate in GOLDEN_CASES.items() if case not in GLUON_CASES]
    assert not any(map(legend_of, sources))


def test_a_header_is_no_part_of_the_digest() -> None:
    source = render(make_candidate(Variant.HOPPER_WS))
    assert hashlib.sha256(body_of(source).encode()).hexdigest()[:DIGEST_CHARACTERS] == source.digest


# --- identity ---------------------------------------------------------------------------------------------------------


def test_digests_are_equal_exactly_where_bodies_are() -> None:
    """Over every knob, and over what a family may differ in."""
    base = [*GOLDEN_CASES.values()]
    families = [replace(one, family=replace(one.family, access=Access.ALIGNED)) for one in base if aligned(one)]
    knobs = [
        replace(one, config=replace(one.config, **{knob.name: value}))
        for one in base[:1] + base[-1:]
        for knob in variant_spec(one.family.kernel_pass, one.variant).knobs
        for value in knob.values
    ]
    sources = [render(candidate) for candidate in [*base, *families, *knobs]]
    by_digest = {source.digest: body_of(source) for source in sources}
    assert len(set(by_digest.values())) == len({body_of(source) for source in sources}) == len(by_digest)
    assert all(body_of(source) == by_digest[source.digest] for source in sources)


def aligned(candidate: Candidate) -> bool:
    return candidate.family.access is Access.TMA


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: f"{spec.kernel_pass}-{spec.variant}")
def test_every_knob_changes_the_kernel(spec: VariantSpec) -> None:
    """A knob that changed nothing would have the same kernel searched twice."""
    one = first_candidate(spec)
    for knob in spec.knobs:
        others = [replace(one, config=replace(one.config, **{knob.name: value})) for value in knob.values]
        assert len({render(other).digest for other in others}) == len(knob.values), knob.name


@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 128, 192, 200, 256])
def test_pieces_that_pass_the_constraints_give_different_kernels(head_dim: int) -> None:
    """And every kernel that they could give, where narrow products cost nothing."""
    one = make_candidate(Variant.PORTABLE, make_family(head_dim=head_dim))
    spec = variant_spec(one.family.kernel_pass, one.variant)
    (values,) = (knob.values for knob in spec.knobs if knob.name == "HEAD_DIM_PIECE")
    others = [replace(one, config=replace(one.config, HEAD_DIM_PIECE=value)) for value in values]
    check = dict(spec.constraints)["head_dim_piece"]
    passing = [other for other in others if check(other.family, None, other.config, KNOWN_DEVICES["a100"]) is None]
    assert len({render(other).digest for other in passing}) == len(passing) == len({render(o).digest for o in others})


def test_the_group_size_and_the_alignment_of_the_diagonal_are_no_part_of_a_kernel() -> None:
    """They are run-time arguments: one kernel serves every GQA group and both causal alignments."""
    kernel = kernel_of(render(make_candidate(Variant.PORTABLE, make_family(causal=True))))
    assert {"gqa_group_size", "diagonal"} <= {argument.arg for argument in ast.parse(kernel).body[0].args.args}  # type: ignore[attr-defined]


# --- a feature that is off leaves no trace ----------------------------------------------------------------------------

ABSENT = {
    "no mask in an exact full kernel": (
        make_candidate(Variant.PORTABLE, EXACT_LENGTHS=True),
        r"mask=|tl\.where\(\w+\[",
    ),
    "no left bound in a causal portable kernel": (
        make_candidate(Variant.PORTABLE, make_family(causal=True)),
        r"left_|first_key|unseen",
    ),
    "no left bound in a causal tma kernel": (
        make_candidate(Variant.TMA, make_family(causal=True)),
        r"left_|first_key|unseen",
    ),
    "no right bound in a kernel bounded to the left": (
        make_candidate(Variant.TMA, make_family(bounded_left=True)),
        r"\bdiagonal|last_key",
    ),
    "no bias and no sink in a plain portable kernel": (
        make_candidate(Variant.PORTABLE),
        r"slope|own_key|key_offset|sink|BASE_2",
    ),
    "no bias and no sink in a plain tma kernel": (
        make_candidate(Variant.TMA),
        r"slope|own_key|key_offset|sink|BASE_2",
    ),
    "no cap in a plain portable kernel": (make_candidate(Variant.PORTABLE), r"tanh|cap"),
    "no cap in a plain tma kernel": (make_candidate(Variant.TMA), r"tanh|cap"),
    "one loop in an exact full kernel": (make_candidate(Variant.TMA, EXACT_LENGTHS=True), r"if full_end"),
    "no diagonal in a full portable kernel": (make_candidate(Variant.PORTABLE), r"diagonal|key_end|last_key"),
    "no diagonal in a full tma kernel": (make_candidate(Variant.TMA), r"diagonal|key_end|last_key"),
    "no last stride in the aligned form": (make_candidate(Variant.PORTABLE), r"stride_[qkvo]d"),
    "no masked columns in a head dim of whole pieces": (
        make_candidate(Variant.PORTABLE, make_family(head_dim=96)),
        r"offs_[de]_\d\[None, :\] <",
    ),
    "no second piece in a head dim of a power of two": (make_candidate(Variant.TMA), r"\b(q|k|v|acc)_1\b"),
    "no lanes of row sums": (make_candidate(Variant.PORTABLE), r"ROW_SUM_LANES|reshape"),
    "no pointers to the output beside its descriptor": (make_candidate(Variant.TMA), r"out_ptr|stride_"),
    "no descriptor of the output beside its pointers": (make_candidate(Variant.TMA, STORE_BY_TMA=False), r"out_desc"),
    "no precision option outside of fp32": (make_candidate(Variant.PORTABLE), r"input_precision"),
}


@pytest.mark.parametrize("what", ABSENT)
def test_a_feature_that_is_off_leaves_no_trace(what: str) -> None:
    candidate, pattern = ABSENT[what]
    assert not re.search(pattern, kernel_of(render(candidate)))


PRESENT = {
    "masks in a ragged kernel": (make_candidate(Variant.PORTABLE), r"mask="),
    "the diagonal in a causal kernel": (make_candidate(Variant.TMA, make_family(causal=True)), r"diagonal"),
    "both diagonals in a window": (
        make_candidate(Variant.TMA, make_family(causal=True, bounded_left=True)),
        r"\bdiagonal.*left_diagonal",
    ),
    "the cap in a kernel of capped scores": (
        make_candidate(Variant.TMA, make_family(softcap=True)),
        r"tanh\(qk \* cap",
    ),
    "the bias and the sink": (
        make_candidate(Variant.TMA, make_family(alibi=True, sinks=True)),
        r"alibi_slopes_ptr.*sinks_ptr.*slope \* tl\.abs.*exp2\(sink - ",
    ),
    "the last stride in the general form": (
        make_candidate(Variant.PORTABLE, make_family(head_dim=59)),
        r"stride_qd.*stride_kd.*stride_vd.*stride_od",
    ),
    "masked columns in a padded head dim": (
        make_candidate(Variant.PORTABLE, make_family(head_dim=59)),
        r"offs_d_0\[None, :\] < 59",
    ),
    "ieee precision in fp32": (
        make_candidate(Variant.PORTABLE, make_family(DType.FLOAT32)),
        r"input_precision='ieee'",
    ),
}


@pytest.mark.parametrize("what", PRESENT)
def test_a_feature_that_is_on_is_there(what: str) -> None:
    candidate, pattern = PRESENT[what]
    assert re.search(pattern, kernel_of(render(candidate)), re.DOTALL)


def test_a_register_cap_is_a_launch_option_only_where_it_is_set() -> None:
    with_cap, without = (render(make_candidate(Variant.TMA, maxnreg=maxnreg)).text for maxnreg in (128, None))
    assert ('"maxnreg": 128' in with_cap, "maxnreg" in body_of(render(make_candidate(Variant.TMA)))) == (True, False)
    assert with_cap != without


# --- what reaches a template ------------------------------------------------------------------------------------------


@dataclass
class RecordingTemplate:
    """Stands for the environment and its template; keeps what render supplies."""

    supplied: dict[str, object] = field(default_factory=dict)

    def get_template(self, name: str) -> "RecordingTemplate":
        return self

    def make_module(self, values: dict[str, object]) -> str:
        self.supplied = values
        return "body\n"


def supplied_to_template(candidate: Candidate) -> dict[str, object]:
    recorder = RecordingTemplate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render_module, "_environment", lambda: recorder)
        render(candidate)
    return recorder.supplied


def undeclared_variables(name: str) -> set[str]:
    """Names that a template expects from outside, its imports' included, but functions that all templates have."""
    environment = render_module._environment()
    found: set[str] = set()
    waiting = [name]
    while waiting:
        tree = environment.parse((templates_dir() / waiting.pop()).read_text())
        assigned = [name for one in tree.find_all(jinja2.nodes.Assign) for name in one.find_all(jinja2.nodes.Name)]
        own = {name.name for name in assigned if name.ctx == "store"}
        found |= jinja2.meta.find_undeclared_variables(tree) - own  # such as those that are set in a branch
        waiting += [reference for reference in jinja2.meta.find_referenced_templates(tree) if reference]
    return found


@pytest.mark.parametrize("path", sorted(templates_dir().glob("*.jinja")), ids=lambda path: path.name)
def test_a_templates_lines_are_no_longer_than_ours(path: Path) -> None:
    assert [line for line in path.read_text().splitlines() if len(line) > 120] == []


def test_templates_together_use_exactly_what_render_supplies() -> None:
    used = set().union(*(undeclared_variables(spec.template) for spec in VARIANTS))
    assert used == set(supplied_to_template(make_candidate(Variant.PORTABLE)))


def leaves(value: object) -> Iterator[object]:
    """Every plain value inside what is supplied to a template."""
    if is_dataclass(value):
        for entry in fields(value):
            yield from leaves(getattr(value, entry.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*leaves(key), *leaves(inner))
    elif isinstance(value, tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


@given(candidate=candidates())
def test_only_numbers_and_enums_reach_a_template_beside_the_rows_of_arguments(candidate: Candidate) -> None:
    supplied = {name: value for name, value in supplied_to_template(candidate).items() if name != "argument_rows"}
    strange = [
        value
        for value in leaves(tuple(supplied.values()))
        if type(value) not in (int, bool, type(None)) and not isinstance(value, Enum)
    ]
    assert strange == []


@pytest.mark.parametrize(
    "name",
    [
        "head_dim",
        "head_dim_v",
        "dtype",
        "access",
        "bounded_right",
        "bounded_left",
        "softcap",
        "alibi",
        "sinks",
        "kernel_pass",
    ],
)
def test_a_family_takes_no_text(name: str) -> None:
    with pytest.raises(InvalidProblemError, match=name):
        replace(make_family(), **{name: "64)\nimport os\n("})


@pytest.mark.parametrize("entry", [entry.name for entry in fields(TmaFwdConfig)])
def test_a_config_takes_no_text(entry: str) -> None:
    with pytest.raises(InvalidConfigError, match=entry):
        replace(make_candidate(Variant.TMA).config, **{entry: "64)\nimport os\n("})


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the templates'."""
    monkeypatch.setattr(render_module, "templates_dir", lambda: tmp_path)
    render_module._environment.cache_clear()
    yield tmp_path
    render_module._environment.cache_clear()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ nowhere }}", "'nowhere' is undefined"),
        ("{% if nowhere %}{% endif %}", "'nowhere' is undefined"),
        ("{{ config.NO_SUCH_KNOB }}", "has no attribute 'NO_SUCH_KNOB'"),
        ("{% if %}", "Expected an expression"),
        ('{% import "_missing.py.jinja" as missing %}', "_missing.py.jinja"),
    ],
)
def test_a_broken_template_is_an_error_of_ours(templates: Path, text: str, reason: str) -> None:
    (templates / "fwd_portable.py.jinja").write_text(text)
    with pytest.raises(TemplateError, match=re.escape(reason)):
        render(make_candidate(Variant.PORTABLE))


def test_a_missing_template_names_its_folder(templates: Path) -> None:
    with pytest.raises(TemplateError, match=re.escape(str(templates))):
        render(make_candidate(Variant.PORTABLE))


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: f"{spec.kernel_pass}-{spec.variant}")
def test_a_config_of_another_variant_is_refused(spec: VariantSpec) -> None:
    one = first_candidate(spec)
    others = [other for other in VARIANTS if other.kernel_pass is spec.kernel_pass and other is not spec]
    for other in others:
        with pytest.raises(TemplateError, match=f"no config of the {other.variant} variant"):
            render(replace(one, variant=other.variant))
