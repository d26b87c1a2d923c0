"""Gates on texts made for them: what each stops, what it lets pass, and why it says so. Compiled kernels meet them in
`test_compiler.py`, machine code in `test_sass.py`."""

from dataclasses import replace
from pathlib import Path

import pytest

from fa_autotune.kernels.gates import (
    GATES,
    CompiledText,
    CompileRequest,
    added_dq,
    score_layout,
    shared_memory,
    tensor_memory,
    vector_access,
    wgmma_serialized,
)
from fa_autotune.kernels.modules import ModuleFile
from fa_autotune.records import ResourceReport
from fa_autotune.space.candidate import CompileForm, Variant

REQUEST = CompileRequest(
    module=ModuleFile(Path("kernel.py"), ""),
    arch="sm_90",
    form=CompileForm.ALIGNED,
    variant=Variant.PORTABLE,
    smem_limit_bytes=1000,
)
TEXT = CompiledText(
    ttgir="",
    assembly="",
    log="",
    threads=128,
    smem_bytes=0,
    tensor_memory_columns=0,
    is_nvidia=True,
    binary=b"",
)
RESOURCES = ResourceReport(registers=168, spill_bytes=0, smem_bytes=1000, compile_s=1.0)

TILE = "    %k = tt.load %ptrs : tensor<64x64x!tt.ptr<bf16>, #blocked>\n"
WIDE_COPY = "    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"


def test_each_gate_has_the_name_of_its_function() -> None:
    assert [name for name, _ in GATES] == [gate.__name__ for _, gate in GATES]


@pytest.mark.parametrize(("smem_bytes", "is_stopped"), [(1000, False), (1001, True)])
def test_shared_memory_fits_to_the_byte(smem_bytes: int, is_stopped: bool) -> None:
    reason = shared_memory(REQUEST, TEXT, replace(RESOURCES, smem_bytes=smem_bytes))
    assert reason == ("needs 1001 bytes of shared memory, sm_90 offers 1000" if is_stopped else None)


@pytest.mark.parametrize(("columns", "is_stopped"), [(512, False), (640, True)])
def test_more_tensor_memory_than_blackwell_has_is_stopped(columns: int, is_stopped: bool) -> None:
    reason = tensor_memory(REQUEST, replace(TEXT, tensor_memory_columns=columns), RESOURCES)
    assert reason == ("needs 640 tensor memory columns of 512" if is_stopped else None)


@pytest.mark.parametrize(
    ("log", "code"),
    [
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized", "C7510"),
        ("ptxas info    : (C7515) Potential Performance Loss", "C7515"),
        ("ptxas info    : (C7519) something else", None),
        ("ptxas info    : Used 168 registers", None),
    ],
)
def test_only_the_assemblers_word_on_serialized_products_is_one(log: str, code: str | None) -> None:
    reason = wgmma_serialized(REQUEST, replace(TEXT, log=log), RESOURCES)
    assert reason == (code and f"the assembler serialized wgmma ({code})")


# --- rows of scores ---------------------------------------------------------------------------------------------------


def reduced(layout: str, *, shape: str = "64x64", product: str = "tt.dot") -> CompiledText:
    """A kernel whose product is reduced along the second axis, in a layout."""
    lines = (
        f"#mma = {layout}",
        f"    %qk = {product} %q, %k, %zero : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32, #mma>",
        '    %m = "tt.reduce"(%qk) <{axis = 1 : i32}> ({',
        f"    }}) : (tensor<{shape}xf32, #mma>) -> tensor<64xf32>",
    )
    return replace(TEXT, ttgir="\n".join(lines))


MMA = "#ttg.nvidia_mma<{{versionMajor = 3, versionMinor = 0, warpsPerCTA = [{}], instrShape = [16, 64, 16]}}>"
LINEAR = "#ttg.linear<{{register = [[0, 1]], lane = [[1, 0]], warp = [{}], block = []}}>"


@pytest.mark.parametrize(
    ("layout", "warps"),
    [
        (MMA.format("4, 1"), None),
        (MMA.format("2, 2"), 2),
        (MMA.format("1, 8"), 8),
        (LINEAR.format("[16, 0], [32, 0]"), None),
        (LINEAR.format("[16, 0], [0, 32]"), 2),
        (LINEAR.format("[0, 32], [0, 64]"), 4),
    ],
)
def test_warps_that_share_a_row_of_scores_are_stopped(layout: str, warps: int | None) -> None:
    reason = score_layout(REQUEST, reduced(layout), RESOURCES)
    assert reason == (warps and f"{warps} warps share a row of scores; more rows or fewer warps avoid it")


def test_a_kernel_without_products_and_a_tensor_of_one_axis_have_no_rows_of_scores() -> None:
    assert score_layout(REQUEST, reduced(MMA.format("2, 2"), product="arith.addf"), RESOURCES) is None
    assert score_layout(REQUEST, reduced(MMA.format("2, 2"), shape="64"), RESOURCES) is None


@pytest.mark.parametrize("product", ["tt.dot", "ttng.warp_group_dot", "ttng.tc_gen5_mma"])
def test_every_kind_of_matrix_product_counts(product: str) -> None:
    assert score_layout(REQUEST, reduced(MMA.format("2, 2"), product=product), RESOURCES) is not None


# --- units of memory --------------------------------------------------------------------------------------------------


def access(ttgir: str, assembly: str, **changes: object) -> str | None:
    request = {name: changes.pop(name) for name in ("form", "variant") if name in changes}
    text = replace(TEXT, ttgir=ttgir, assembly=assembly, **changes)  # type: ignore[arg-type]
    return vector_access(replace(REQUEST, **request), text, RESOURCES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("load", "units"),
    [
        (WIDE_COPY, None),
        ("    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n", None),
        ("    ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd1 + 0 ];\n", None),
        ("    ld.global.b16 { %rs1 }, [ %rd1 + 0 ];\n", 2),
        ("    ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];\n", 8),
        ("    cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r2;\n", 8),
    ],
)
def test_an_aligned_kernel_reads_its_tiles_16_bytes_at_a_time(load: str, units: int | None) -> None:
    reason = access(TILE, WIDE_COPY + load)
    assert reason == (units and f"reads global memory in units of {units} bytes, not 16")


def test_a_small_tile_is_read_by_what_it_has_for_each_thread() -> None:
    small = "    %k = tt.load %ptrs : tensor<16x16x!tt.ptr<bf16>, #blocked>\n"  # 512 bytes for 128 threads
    narrow = "    ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n"
    assert access(small, narrow) is None
    assert access(TILE, narrow) is not None


@pytest.mark.parametrize(
    "changes", [{"form": CompileForm.GENERAL}, {"is_nvidia": False}], ids=["general form", "other assembly"]
)
def test_what_promises_nothing_is_not_judged(changes: dict[str, object]) -> None:
    assert access(TILE, "    ld.global.b16 { %rs1 }, [ %rd1 + 0 ];\n", **changes) is None


@pytest.mark.parametrize("variant", [Variant.TMA, Variant.HOPPER_WS, Variant.HOPPER_WIDE])
def test_kernels_that_read_by_descriptors_do(variant: Variant) -> None:
    copy = "    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier [ %r1 ], [ %rd1, { %r2 } ], [ %r3 ];\n"
    assert access(TILE, copy, variant=variant) is None
    assert access(TILE, WIDE_COPY, variant=variant) == "no tensor descriptor load was generated"


def test_statistics_starts_seeds_slopes_and_elements_of_a_loose_mask_may_be_read_singly() -> None:
    word, long = "    ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n", "    ld.global.b64 { %rd2 }, [ %rd1 + 0 ];\n"
    rows = "    %lse = tt.load %p : tensor<64x!tt.ptr<f32>, #row>\n"
    assert access(TILE + rows, WIDE_COPY + word) is None
    assert access(TILE + "    %seed = tt.load %p : !tt.ptr<i64>\n", WIDE_COPY + long) is None
    assert access(TILE + "    %slope = tt.load %p : !tt.ptr<f32>\n", WIDE_COPY + word) is None
    element = "    ld.global.b16 { %rs1 }, [ %rd1 + 0 ];\n"
    assert access(TILE, WIDE_COPY + element, reads_elements=True) is None
    for single in (word, long, element):
        assert access(TILE, WIDE_COPY + single) is not None


def test_a_tile_of_bools_may_be_read_8_bytes_at_a_time() -> None:
    half = "    ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];\n"
    bools = "    %mask = tt.load %p : tensor<64x64x!tt.ptr<i8>, #blocked>\n"
    assert access(TILE + bools, WIDE_COPY + half) is None
    assert access(TILE, WIDE_COPY + half) is not None


def test_a_fused_backward_adds_dq_up_through_a_descriptor() -> None:
    entry = ".visible .entry attention_bwd_fused(\n"
    added = "    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [ %rd1 ], [ %r1 ];\n"
    assert added_dq(REQUEST, replace(TEXT, assembly=entry + added), RESOURCES) is None
    reason = added_dq(REQUEST, replace(TEXT, assembly=entry + "    red.global.add.f32 [ %rd1 ], %f1;\n"), RESOURCES)
    assert reason == "no addition through a tensor descriptor was generated"
    assert added_dq(REQUEST, replace(TEXT, assembly=".visible .entry attention_fwd(\n"), RESOURCES) is None
