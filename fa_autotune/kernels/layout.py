"""Lists of names in generated code: how they are put together, and on which lines they stand.

Templates use these functions beside Jinja's own: kernels in Gluon hand long lists to their partitions of warps.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

INDENT = "    "

Part: TypeAlias = "str | Iterable[Part]"


class Names(tuple[str, ...]):
    """Names of parameters, arguments or results, in order; in a template's text they are separated by commas."""

    __slots__ = ()

    def __str__(self) -> str:
        return ", ".join(self)


def names(*parts: Part) -> Names:
    """Names and lists of names as one list; a part may be `"name" if condition`, which is nothing where it is false."""
    found: list[str] = []
    for part in parts:
        found += [part] if isinstance(part, str) else names(*part)
    return Names(found)


def each(prefix: str, items: Sequence[object]) -> Names:
    """prefix_0, prefix_1, … for the pieces of a head dim, or other items."""
    return Names(f"{prefix}_{number}" for number in range(len(items)))


def lines(listed: Iterable[str], room: int) -> str:
    """Names on as few lines as hold them, each of at most `room` characters before the comma at its end."""
    done, line = list[str](), ""
    for name in listed:
        if line and len(line) + len(name) + 2 > room:
            done.append(f"{line},")
            line = name
        else:
            line = f"{line}, {name}" if line else name
    return "\n".join([*done, line])


def call(head: str, listed: Iterable[str], room: int) -> str:
    """`head(names)`: on one line where `room` characters hold it, else with the names on lines of their own."""
    taken = names(listed)
    if len(head) + len(str(taken)) + 2 <= room:
        return f"{head}({taken})"
    inside = lines(taken, room - 5).replace("\n", f"\n{INDENT}")
    return f"{head}(\n{INDENT}{inside},\n)"
