"""NVIDIA machine code (SASS) as text, and what its loops of matrix products do besides."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory

from fa_autotune.kernels.triton_private import disassembler

PATIENCE_S = 60.0

_ALL = (1 << 63) - 1  # UR0 … UR62; UR63 reads as zero
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@\S+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")  # where a table leads, no text says: its targets count as entries


@lru_cache(maxsize=2)
def disassembled(binary: bytes) -> str | None:
    """The SASS of a cubin; None where Triton's disassembler is missing or refuses it."""
    if (program := disassembler()) is None:
        return None
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        try:
            command = [program, "-sass", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout


def spills_beside_products(sass: str) -> int | None:
    """How many instructions store or load spilled registers in the innermost loops of wgmma; None where none are."""
    blocks = _blocks(sass)
    loops = _product_loops(blocks)
    if not loops:
        return None
    places = set[int]().union(*loops.values())
    return sum(one.name.startswith(("STL", "LDL")) for place in places for one in blocks[place].code)


def products_of_unset_addresses(sass: str) -> int:
    """How many matrix products in those loops take the address of an operand from a register that was set on some ways
    to the loop and on others not at all."""
    blocks = _blocks(sass)
    before = _predecessors(blocks)
    unset, is_set = _flow(blocks, before, keeps=True), _flow(blocks, before, keeps=False)
    count = 0
    for head, body in _product_loops(blocks).items():
        outside = [place for place in before[head] if place not in body]
        doubtful = _union(unset[place] for place in outside) & _union(is_set[place] for place in outside)
        doubts = {place: 0 for place in body} | {head: doubtful}
        pending = [head]
        while pending:
            place = pending.pop()
            left = doubts[place] & ~blocks[place].always_sets
            for after in blocks[place].next:
                if after in body and left & ~doubts[after]:
                    doubts[after] |= left
                    pending.append(after)
        for place, doubt in doubts.items():
            for one in blocks[place].code:
                count += bool(one.addresses & doubt)
                doubt &= ~one.sets if one.is_unconditional else ~0
    return count


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One line of code. Sets of uniform registers (those that all threads of a warp share) are bits of a number."""

    name: str
    guard: str | None
    operands: tuple[str, ...]

    @property
    def is_unconditional(self) -> bool:
        return self.guard in (None, "@PT", "@UPT")

    @property
    def sets(self) -> int:
        """The uniform registers that it writes."""
        places = self.operands[:1] if not re.match(r"!?U?P", " ".join(self.operands[:1])) else self.operands[1:2]
        found = re.fullmatch(r"UR(\d+)", places[0]) if places else None
        width = 0b11 if ".64" in self.name or ".WIDE" in self.name else 0b1
        return width << int(found[1]) if found else 0

    @property
    def addresses(self) -> int:
        """The uniform registers with the addresses of a matrix product's operands: two for the left one, unless that is
        in registers itself, and the next two for the right one."""
        found = re.search(r"gdesc\[UR(\d+)\]", ", ".join(self.operands))
        if found is None or not self.name.startswith("HGMMA"):
            return 0
        left_in_registers = re.match(r"R\d", self.operands[1])
        return (0b1100 if left_in_registers else 0b1111) << int(found[1])


@dataclass(frozen=True, slots=True)
class _Block:
    """A stretch of code without a branch or a target inside, and where it goes on."""

    code: tuple[_Instruction, ...]
    next: tuple[int, ...]

    @property
    def multiplies(self) -> bool:
        return any(one.name.startswith("HGMMA") for one in self.code)

    @property
    def sets(self) -> int:
        return _union(one.sets for one in self.code)

    @property
    def always_sets(self) -> int:
        return _union(one.sets for one in self.code if one.is_unconditional)


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _blocks(sass: str) -> list[_Block]:
    lines = list(_INSTRUCTION.finditer(sass))
    if not lines:
        return []
    code = [_Instruction(m[3], m[2], tuple(word.strip() for word in m[4].split(","))) for m in lines]
    place_of = {int(match[1], 16): place for place, match in enumerate(lines)}
    targets: dict[int, int] = {}
    for place, one in enumerate(code):
        if one.name.startswith("BRA") and (found := _TARGET.search(one.operands[-1])):
            target = place_of.get(int(found[1], 16))
            if target is not None:
                targets[place] = target
    ends = {place for place, one in enumerate(code) if one.name.split(".")[0] in ("BRA", *_ENDS)}
    starts = sorted({0, *targets.values(), *(place + 1 for place in ends)} - {len(code)})
    number = {start: block for block, start in enumerate(starts)}
    blocks = []
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[stop - 1]
        leaves = last.name.split(".")[0] in _ENDS or (last.name == "BRA" and len(last.operands) == 1)
        after = [] if (leaves and last.is_unconditional) or stop == len(code) else [number[stop]]
        jumps = [number[targets[stop - 1]]] if stop - 1 in targets else []
        blocks.append(_Block(code=tuple(code[start:stop]), next=tuple(after + jumps)))
    return blocks


def _predecessors(blocks: list[_Block]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for place, block in enumerate(blocks):
        for after in block.next:
            before[after].append(place)
    return before


def _flow(blocks: list[_Block], before: list[list[int]], *, keeps: bool) -> list[int]:
    """The registers that some way to the end of a block leaves unset (`keeps`), or those that some way sets."""
    entries = _entries(blocks)
    leaving = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for place, block in enumerate(blocks):
            arriving = _union(leaving[one] for one in before[place])
            if keeps:
                found = (arriving | (_ALL if place in entries else 0)) & ~block.always_sets
            else:
                found = arriving | block.sets
            changed |= found != leaving[place]
            leaving[place] = found
    return leaving


def _product_loops(blocks: list[_Block]) -> dict[int, set[int]]:
    """The innermost loops that multiply: head → blocks."""
    loops = {head: body for head, body in _loops(blocks).items() if any(blocks[place].multiplies for place in body)}
    return {head: body for head, body in loops.items() if not any(other in body for other in loops if other != head)}


def _loops(blocks: list[_Block]) -> dict[int, set[int]]:
    """The natural loops: head → its blocks. The code between a branch back and its target would not do, since the
    assembler moves what rarely runs to the end."""
    before = _predecessors(blocks)
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
