"""Runs inline assembly of a kernel for the 32 lanes of a warp, on a CPU: the few instructions that ours use."""

import re
from collections.abc import Callable, Sequence

WORD = 0xFFFFFFFF
LANES = range(32)
Values = list[int]  # of a register, one for each lane

_STATEMENT = re.compile(r"(?:@(\w+)\s+)?([a-z][\w.]*)\s+(.*)", re.DOTALL)
_LANEWISE: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: a ^ WORD,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: (a + b) & WORD,
    "shl.b32": lambda a, b: (a << b) & WORD,
    "mul.wide.u32": lambda a, b: a * b,
    "setp.ne.u32": lambda a, b: int(a != b),
    "setp.lt.u32": lambda a, b: int(a < b),
    "selp.b32": lambda a, b, condition: a if condition else b,
    "prmt.b32": lambda a, b, selector: _permuted(a | b << 32, selector),
}


def run_warp(assembly: str, inputs: Sequence[Sequence[int]], outputs: int) -> list[Values]:
    """The registers $0 … that an assembly writes, `outputs` of them; `inputs` are those after them, for each lane."""
    registers = {f"${outputs + number}": list(values) for number, values in enumerate(inputs)}
    for statement in assembly.strip().strip("{}").split(";"):
        found = _STATEMENT.fullmatch(statement.strip())
        if found is not None and not found[2].startswith("."):
            _execute(registers, found[1], found[2], [one.strip() for one in found[3].split(",")])
    return [registers[f"${number}"] for number in range(outputs)]


def _execute(registers: dict[str, Values], condition: str | None, name: str, operands: list[str]) -> None:
    if name == "mov.b64":  # {low, high}, wide
        low, high, wide = (operand.strip("{} ") for operand in operands)
        registers[low] = [value & WORD for value in registers[wide]]
        registers[high] = [value >> 32 for value in registers[wide]]
        return
    target, *sources = operands
    values = [registers[source] if source in registers else [int(source, 0)] * len(LANES) for source in sources]
    if name == "shfl.sync.bfly.b32":
        new = [values[0][lane ^ values[1][lane]] for lane in LANES]
    else:
        new = [_LANEWISE[name](*(value[lane] for value in values)) for lane in LANES]
    if condition is not None:
        new = [new[lane] if registers[condition][lane] else registers[target][lane] for lane in LANES]
    registers[target] = new


def _permuted(pair: int, selector: int) -> int:
    """Bytes of a pair of words; the highest bit of a number asks for its byte's sign instead."""
    result = 0
    for place in range(4):
        number = selector >> 4 * place & 0xF
        byte = pair >> 8 * (number & 7) & 0xFF
        result |= ((0xFF if byte & 0x80 else 0) if number & 8 else byte) << 8 * place
    return result
