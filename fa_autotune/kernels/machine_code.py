"""What a compiled kernel is on the GPU, apart from what is said about it."""

import hashlib
import struct
from collections.abc import Iterator

DIGEST_CHARACTERS = 16
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_PROGBITS = 1
_ALLOC = 2  # the flag of a section that the GPU loads
_REGISTERS_BIT = 24  # NVIDIA keeps the registers per thread in a code section's info, from this bit on


def code_digest(binary: bytes) -> str | None:
    """Digest of what the GPU loads of a kernel's binary (code and constants); None if that is no ELF file.

    Where the source lay, and its lines, are left out: two texts that compile to the same machine code have one digest.
    """
    try:
        sections = sorted(_loaded_sections(binary))
    except (struct.error, ValueError, IndexError):
        return None
    digest = hashlib.sha256()
    for name, registers, content in sections:
        digest.update(struct.pack("<QQQ", len(name), registers, len(content)) + name + content)
    return digest.hexdigest()[:DIGEST_CHARACTERS] if sections else None


def _loaded_sections(binary: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Name, registers per thread and content of each."""
    if not binary.startswith(_ELF64_LITTLE_ENDIAN):
        return
    (table,) = struct.unpack_from("<Q", binary, 40)
    size, count, names = struct.unpack_from("<HHH", binary, 58)
    headers = [_SECTION.unpack_from(binary, table + number * size) for number in range(count)]
    texts = headers[names][4]
    for name, kind, flags, _, offset, length, _, info, *_ in headers:
        if kind == _PROGBITS and flags & _ALLOC:
            start = texts + name
            yield binary[start : binary.index(b"\0", start)], info >> _REGISTERS_BIT, binary[offset : offset + length]
