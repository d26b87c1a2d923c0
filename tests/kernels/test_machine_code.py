"""The digest of machine code: equal for equal code, whatever text it came from."""

import struct

import pytest

from fa_autotune.kernels.machine_code import code_digest

Section = tuple[bytes, int, int, int, bytes]  # name, type, flags, info, content
CODE: Section = (b".text.kernel", 1, 6, 168 << 24, b"\x01\x02\x03\x04")
CONSTANTS: Section = (b".nv.constant0", 1, 2, 0, b"\0" * 8)
LINES: Section = (b".debug_line", 1, 0, 0, b"kernel.py:12")


def elf(*sections: Section) -> bytes:
    """A file of sections as the format lays them out."""
    names = b"\0" + b"".join(name + b"\0" for name, *_ in sections) + b".shstrtab\0"
    contents, headers, offset = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)], 64
    for name, kind, flags, info, content in (*sections, (b".shstrtab", 3, 0, 0, names)):
        at = names.index(b"\0" + name + b"\0") + 1
        headers.append(
            struct.pack("<IIQQQQIIQQ", at, kind, flags, 0, offset + len(contents), len(content), 0, info, 1, 0)
        )
        contents += content
    start = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", offset + len(contents)) + bytes(10)
    return start + struct.pack("<HHH", 64, len(headers), len(headers) - 1) + contents + b"".join(headers)


def test_lines_and_order_are_left_out() -> None:
    digest = code_digest(elf(CODE, CONSTANTS, LINES))
    assert digest
    assert digest == code_digest(elf(CONSTANTS, CODE, (*LINES[:4], b"other.py:99")))


@pytest.mark.parametrize(
    "other",
    [(CODE[0], 1, 6, 168 << 24, b"\x01\x02\x03\x05"), (CODE[0], 1, 6, 160 << 24, CODE[4]), (b".text.k", *CODE[1:])],
    ids=["code", "registers", "name"],
)
def test_what_the_gpu_loads_counts(other: Section) -> None:
    assert code_digest(elf(CODE)) != code_digest(elf(other))


def test_constants_count() -> None:
    assert code_digest(elf(CODE)) != code_digest(elf(CODE, CONSTANTS))


def test_what_is_no_binary_has_none() -> None:
    whole = elf(CODE, CONSTANTS)
    assert {code_digest(binary) for binary in (b"", b".version 8.7", whole[:80], elf(LINES))} == {None}
