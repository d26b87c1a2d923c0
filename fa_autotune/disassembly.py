"""NVIDIA machine code (SASS) as text, and what its loops of matrix products do besides."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PATIENCE_S = 60.0

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@\S+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")  # where a table leads, no text says: its targets count as entries


def disassembled(binary: bytes) -> str | None:
    """The SASS of a cubin; None where Triton's disassembler is missing or refuses it."""
    from triton import knobs  # noqa: PLC0415 - a second or more to import

    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        try:
            command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        except (OSError, RuntimeError, subprocess.SubprocessError):
            return None
    return done.stdout


def spills_beside_products(sass: str) -> int | None:
    """How many instructions store or load spilled registers in the innermost loops of wgmma; None where none are."""
    blocks = _blocks(sass)
    loops = {head: body for head, body in _loops(blocks).items() if any(blocks[place].multiplies for place in body)}
    if not loops:
        return None
    inner = [body for head, body in loops.items() if not any(other in body for other in loops if other != head)]
    return sum(blocks[place].spills for place in set[int]().union(*inner))


@dataclass(slots=True)
class _Block:
    """A stretch of code without a branch or a target inside, and where it goes on."""

    multiplies: bool
    spills: int
    next: tuple[int, ...]


def _blocks(sass: str) -> list[_Block]:
    code = [(int(match[1], 16), match[2], match[3], match[4]) for match in _INSTRUCTION.finditer(sass)]
    if not code:
        return []
    place_of = {address: place for place, (address, *_) in enumerate(code)}
    targets: dict[int, int] = {}
    for place, (_, _, name, operands) in enumerate(code):
        if name.startswith("BRA") and (found := _TARGET.search(operands)) and int(found[1], 16) in place_of:
            targets[place] = place_of[int(found[1], 16)]
    ends = {place for place, (_, _, name, _) in enumerate(code) if name.split(".")[0] in ("BRA", *_ENDS)}
    starts = sorted({0, *targets.values(), *(place + 1 for place in ends)} - {len(code)})
    number = {start: block for block, start in enumerate(starts)}
    blocks = []
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        names = [name for _, _, name, _ in code[start:stop]]
        _, guard, name, operands = code[stop - 1]
        always = guard in (None, "@PT") and (name.split(".")[0] in _ENDS or (name == "BRA" and "," not in operands))
        after = [] if (stop - 1 in ends and always) or stop == len(code) else [number[stop]]
        jumps = [number[targets[stop - 1]]] if stop - 1 in targets else []
        blocks.append(
            _Block(
                multiplies=any(name.startswith("HGMMA") for name in names),
                spills=sum(name.startswith(("STL", "LDL")) for name in names),
                next=tuple(after + jumps),
            )
        )
    return blocks


def _loops(blocks: list[_Block]) -> dict[int, set[int]]:
    """The natural loops: head → its blocks. The code between a branch back and its target would not do, since the
    assembler moves what rarely runs to the end."""
    before: list[list[int]] = [[] for _ in blocks]
    for place, block in enumerate(blocks):
        for after in block.next:
            before[after].append(place)
    dominators = _dominators(blocks, before)
    loops: dict[int, set[int]] = {}
    for place, block in enumerate(blocks):
        for head in block.next:
            if dominators[place] >> head & 1:
                body = loops.setdefault(head, {head})
                pending = [place]
                while pending:
                    if (one := pending.pop()) not in body:
                        body.add(one)
                        pending += before[one]
    return loops


def _dominators(blocks: list[_Block], before: list[list[int]]) -> list[int]:
    """For each block a set of bits: every way to it leads through those blocks. `before`: which blocks lead to it."""
    entries = _entries(blocks)
    everything = (1 << len(blocks)) - 1
    dominators = [everything] * len(blocks)
    changed = True
    while changed:
        changed = False
        for place, earlier in enumerate(before):
            known = 0 if place in entries else everything
            for one in earlier:
                known &= dominators[one]
            known |= 1 << place
            changed |= known != dominators[place]
            dominators[place] = known
    return dominators


def _entries(blocks: list[_Block]) -> set[int]:
    """The first block, and the first of what no branch leads to: the targets of jumps through a table."""
    entries, reached = set(), set[int]()
    for place in range(len(blocks)):
        if place not in reached:
            entries.add(place)
        pending = [place]
        while pending:
            if (one := pending.pop()) not in reached:
                reached.add(one)
                pending += blocks[one].next
    return entries
