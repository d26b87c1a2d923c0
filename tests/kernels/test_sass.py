"""Reading machine code: which loop an instruction is in, wherever the assembler put it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fa_autotune.kernels import gates
from fa_autotune.kernels.compiler import resource_report
from fa_autotune.kernels.gates import (
    MAX_SPILLS_BESIDE_PRODUCTS,
    CompiledText,
    CompileRequest,
    set_addresses,
    spills,
)
from fa_autotune.kernels.modules import ModuleFile
from fa_autotune.kernels.sass import disassembled, products_of_unset_addresses, spills_beside_products
from fa_autotune.space.candidate import CompileForm, Variant


def listing(*lines: str) -> str:
    """As cuobjdump prints it, 16 bytes an instruction; `loop:` names the next address, `BRA loop` goes there."""
    addresses: dict[str, int] = {}
    code: list[str] = []
    for line in lines:
        if line.endswith(":"):
            addresses[line[:-1]] = 16 * len(code)
        else:
            code.append(line)
    text = '\t\tFunction : attention_fwd\n\t.headerflags\t@"EF_CUDA_SM90"\n'
    for place, plain in enumerate(code):
        *words, last = plain.split(" ")
        line = " ".join([*words, hex(addresses[last]) if last in addresses else last])
        text += f"        /*{16 * place:04x}*/  {line} ;   /* 0x0000000000007918 */\n"
        text += "                                       /* 0x000fc00000000000 */\n"
    return text


PRODUCT, STORE, LOAD = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ", "STL [R1], R4", "LDL.LU R4, [R1+0x8]"


def test_a_spill_in_a_loop_of_products_counts() -> None:
    assert spills_beside_products(listing("loop:", PRODUCT, STORE, LOAD, "@P0 BRA loop", "EXIT")) == 2


def test_a_spill_before_and_after_the_loop_does_not() -> None:
    assert spills_beside_products(listing(STORE, "loop:", PRODUCT, "@P0 BRA loop", LOAD, "EXIT")) == 0


def test_a_spill_in_a_loop_without_products_does_not() -> None:
    assert spills_beside_products(listing(PRODUCT, "loop:", STORE, "@P0 BRA loop", "EXIT")) is None


@pytest.mark.parametrize("product", ["HMMA.16816.F32.BF16 R4, R8, R12, R4", "FFMA R4, R5, R6, R4"])
def test_loops_of_other_products_are_not_judged(product: str) -> None:
    assert spills_beside_products(listing("loop:", product, STORE, "@P0 BRA loop", "EXIT")) is None


def test_only_the_innermost_loop_of_products_counts() -> None:
    """The outer one goes over tiles and holds products, too."""
    text = listing("tile:", PRODUCT, STORE, "step:", PRODUCT, "@P0 BRA step", LOAD, "@P1 BRA tile", "EXIT")
    assert spills_beside_products(text) == 0


def test_a_loop_that_waits_inside_a_loop_of_products_hides_nothing() -> None:
    text = listing("step:", "wait:", "SYNCS.PHASECHK P1", "@!P1 BRA wait", PRODUCT, STORE, "@P0 BRA step", "EXIT")
    assert spills_beside_products(text) == 1


def test_code_moved_to_the_end_makes_no_loop_of_what_lies_between() -> None:
    """A wait that rarely fails: its retry lies behind everything, and jumps back over it."""
    text = listing(
        "@!P1 BRA retry", "back:", PRODUCT, STORE, "step:", PRODUCT, "@P0 BRA step", LOAD, "EXIT",
        "retry:", "SYNCS.PHASECHK P1", "@!P1 BRA retry", "BRA back",
    )  # fmt: skip
    assert spills_beside_products(text) == 0


def test_code_moved_out_of_a_loop_to_the_end_still_counts() -> None:
    text = listing(
        "step:", "@!P1 BRA rare", "back:", PRODUCT, "@P0 BRA step", "EXIT", "rare:", LOAD, "BRA back",
    )  # fmt: skip
    assert spills_beside_products(text) == 1


def test_warps_that_return_to_the_table_of_their_roles_make_no_loop() -> None:
    """So Triton runs the parts of a warp-specialised kernel: a jump through a table, and back when a part is done."""
    text = listing(
        "wait:", "BAR.SYNC 1", "BRX R2 -0x20",
        "spin:", "SYNCS.PHASECHK P1", "@!P1 BRA spin", PRODUCT, STORE, "step:", PRODUCT, "@P0 BRA step", "BRA wait",
    )  # fmt: skip
    assert spills_beside_products(text) == 0
    assert spills_beside_products(text.replace("STL [R1], R4", "NOP").replace("BAR.SYNC 1", "LDL R4, [R1]")) == 0


@pytest.mark.parametrize("branch", ["@P0 BRA loop", "BRA.U UP0, loop", "BRA loop"])
def test_every_kind_of_branch_back_makes_a_loop(branch: str) -> None:
    assert spills_beside_products(listing("loop:", PRODUCT, STORE, "@P1 EXIT", branch, "EXIT")) == 1


@pytest.mark.parametrize("text", ["", "no code", "/* 0x00 */"])
def test_text_without_instructions_has_no_spills(text: str) -> None:
    assert spills_beside_products(text) is None


@pytest.mark.kernel
def test_what_is_no_binary_can_not_be_read() -> None:
    assert disassembled(b"no cubin") is None


@pytest.mark.kernel
def test_a_missing_disassembler_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs, "nvidia", SimpleNamespace(cuobjdump=SimpleNamespace(path="/nowhere/cuobjdump")))
    assert disassembled(b"a cubin") is None


# --- the gate ---------------------------------------------------------------------------------------------------------

FEW_IN_LOOP = listing("loop:", PRODUCT, *[STORE] * MAX_SPILLS_BESIDE_PRODUCTS, "@P0 BRA loop", "EXIT")
IN_LOOP = listing("loop:", PRODUCT, *[STORE] * (MAX_SPILLS_BESIDE_PRODUCTS + 1), "@P0 BRA loop", "EXIT")
NO_WGMMA = listing("loop:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", STORE, "@P0 BRA loop", "EXIT")
BEFORE = listing(STORE, "loop:", PRODUCT, "@P0 BRA loop", "EXIT")


def compiled_and_asked(spill_bytes: int, variant: Variant, arch: str) -> tuple[CompiledText, CompileRequest]:
    text = CompiledText(
        ttgir="",
        assembly="",
        log=f"    0 bytes stack frame, {spill_bytes} bytes spill stores, {spill_bytes} bytes spill loads",
        threads=384,
        smem_bytes=0,
        tensor_memory_columns=0,
        is_nvidia=True,
        binary=b"the kernel's",
    )
    request = CompileRequest(
        module=ModuleFile(Path("kernel.py"), ""),
        arch=arch,
        form=CompileForm.ALIGNED,
        variant=variant,
        smem_limit_bytes=0,
    )
    return text, request


def gate(
    monkeypatch: pytest.MonkeyPatch, spill_bytes: int, sass: str | None, variant: Variant, arch: str = "sm_90"
) -> str | None:
    """What the gate says of a kernel that spills so much."""
    text, request = compiled_and_asked(spill_bytes, variant, arch)

    def read(binary: bytes) -> str | None:
        assert binary == b"the kernel's"
        assert spill_bytes > 0, "disassembled for nothing"
        assert variant.is_gluon or (arch == "sm_90" and 64 < spill_bytes <= 256), "disassembled for nothing"
        return sass

    monkeypatch.setattr(gates, "disassembled", read)
    return spills(request, text, resource_report(text, 0.0))


@pytest.mark.parametrize(
    ("spill_bytes", "sass", "reason"),
    [
        (0, IN_LOOP, None),
        (4, FEW_IN_LOOP, None),
        (4, IN_LOOP, "9 instructions spill in loops of matrix products (4 bytes per thread)"),
        (4, BEFORE, None),
        (256, BEFORE, None),
        (260, BEFORE, "spills 260 bytes per thread, at most 256 are let through"),
        (64, None, None),
        (68, None, "spills 68 bytes per thread, at most 64 are let through"),
    ],
)
def test_a_hopper_kernel_may_spill_hardly_in_its_loops(
    spill_bytes: int, sass: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gate(monkeypatch, spill_bytes, sass, Variant.HOPPER_WS) == reason


@pytest.mark.parametrize("variant", [Variant.PORTABLE, Variant.TMA])
@pytest.mark.parametrize(
    ("spill_bytes", "sass", "reason"),
    [
        (64, IN_LOOP, None),
        (68, BEFORE, None),
        (256, BEFORE, None),
        (68, FEW_IN_LOOP, None),
        (68, IN_LOOP, "9 instructions spill in loops of matrix products (68 bytes per thread)"),
        (260, BEFORE, "spills 260 bytes per thread, at most 64 are let through"),
        (68, None, "spills 68 bytes per thread, at most 64 are let through"),
        (68, NO_WGMMA, "spills 68 bytes per thread, at most 64 are let through"),
    ],
)
def test_other_kernels_for_hopper_may_spill_a_little_anywhere(
    spill_bytes: int, sass: str | None, reason: str | None, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gate(monkeypatch, spill_bytes, sass, variant) == reason


def test_other_archs_keep_the_limit_on_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gate(monkeypatch, 64, BEFORE, Variant.TMA, "sm_80") is None
    assert (
        gate(monkeypatch, 68, BEFORE, Variant.TMA, "sm_80") == "spills 68 bytes per thread, at most 64 are let through"
    )


# --- addresses that may be unset --------------------------------------------------------------------------------------

SCORES = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT"  # UR8, UR9: queries; UR10, UR11: keys
OUTPUT = "HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88"  # P is in registers; UR10, UR11: values


def set_all(*but: int) -> list[str]:
    return [f"R2UR UR{register}, R4" for register in range(8, 12) if register not in but]


def two_loops(*, before: list[str], preheader: list[str], product: str = SCORES) -> str:
    """A loop that may be skipped with what prepares it, and after it a loop that may read what that has set."""
    return listing(
        *before, "@P0 BRA second", *preheader, "first:", product, "@P1 BRA first",
        "second:", "NOP", "again:", product, "@P2 BRA again", "EXIT",
    )  # fmt: skip


def test_an_address_set_for_a_loop_that_may_be_skipped_is_unset_in_the_next() -> None:
    assert products_of_unset_addresses(two_loops(before=set_all(8), preheader=["UMOV UR8, UR4"])) == 1
    assert products_of_unset_addresses(two_loops(before=[], preheader=set_all())) == 1


def test_an_address_set_ahead_of_both_loops_is_fine() -> None:
    assert products_of_unset_addresses(two_loops(before=set_all(), preheader=["NOP"])) == 0
    assert products_of_unset_addresses(two_loops(before=set_all(), preheader=["UMOV UR8, UR4"])) == 0


@pytest.mark.parametrize(
    "pair", ["ULDC.64 UR8, c[0x0][0x210]", "UIADD3.64 UR8, UR4, 0x2, URZ", "UIMAD.WIDE UR8, UR4, UR5, UR6"]
)
def test_a_wide_result_sets_two(pair: str) -> None:
    assert products_of_unset_addresses(two_loops(before=[pair, *set_all(8, 9)], preheader=["UMOV UR9, UR4"])) == 0


@pytest.mark.parametrize("line", ["@P3 R2UR UR8, R4", "@!UP0 UMOV UR8, UR4"])
def test_what_may_not_be_executed_sets_nothing_for_sure(line: str) -> None:
    text = listing(*set_all(8), line, "loop:", SCORES, "@P0 BRA loop", "EXIT")
    assert products_of_unset_addresses(text) == 1


def test_a_carry_beside_the_result_hides_nothing() -> None:
    text = two_loops(before=set_all(8), preheader=["UIADD3 UP0, UR8, UR4, 0x2, URZ"])
    assert products_of_unset_addresses(text) == 1


def test_a_left_operand_in_registers_has_no_address() -> None:
    left, right = ["UMOV UR8, UR4"], ["UMOV UR10, UR4"]
    assert products_of_unset_addresses(two_loops(before=set_all(8), preheader=left, product=OUTPUT)) == 0
    assert products_of_unset_addresses(two_loops(before=set_all(10), preheader=right, product=OUTPUT)) == 1


def test_an_address_computed_in_each_step_is_fine() -> None:
    text = listing(
        *set_all(10), "@P0 BRA loop", "UMOV UR10, UR4",
        "loop:", "ULEA UR10, UR5, UR6, 0x3", SCORES, "@P1 BRA loop", "EXIT",
    )  # fmt: skip
    assert products_of_unset_addresses(text) == 0


def test_an_address_that_is_set_nowhere_came_with_the_warps_role() -> None:
    """Before the jump through the table of roles, whose targets no text gives."""
    text = listing(*set_all(8), "loop:", SCORES, "@P1 BRA loop", "EXIT")
    assert products_of_unset_addresses(text) == 0


@pytest.mark.parametrize(
    ("variant", "is_looked_at"), [(Variant.HOPPER_WS, True), (Variant.HOPPER_WIDE, True), (Variant.TMA, False)]
)
def test_the_gate_says_how_many_products_are_wrong(
    variant: Variant, is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, request = compiled_and_asked(0, variant, "sm_90")
    resources = resource_report(text, 0.0)
    code = two_loops(before=set_all(8), preheader=["UMOV UR8, UR4"])
    monkeypatch.setattr(gates, "disassembled", lambda binary: code)
    reason = "1 matrix products take an address from a register that may be unset"
    assert set_addresses(request, text, resources) == (reason if is_looked_at else None)
    monkeypatch.setattr(gates, "disassembled", lambda binary: None)
    assert set_addresses(request, text, resources) is None
