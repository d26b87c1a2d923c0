"""Kernels made to fail: a rendered module whose text is changed, under a digest and a name of its own."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fa_autotune.kernels.render import DIGEST_CHARACTERS, KernelSource, render
from fa_autotune.space.candidate import Candidate

Sabotage = Callable[[str], str]  # the text of a generated module, changed
Render = Callable[[Candidate], KernelSource]

_ENTRY = re.compile(r"^def arguments\(.*?\):\n    \"\"\".*?\"\"\"\n", re.MULTILINE | re.DOTALL)


def before_each_launch(*lines: str) -> Sabotage:
    """Statements at the start of `arguments()`, which runs in the measuring worker before each launch.

    They see q, k, v, out, lse, softmax_scale, diagonal, os, time and torch.
    """

    def change(text: str) -> str:
        entry = _ENTRY.search(text)
        assert entry is not None
        inserted = "".join(f"    {line}\n" for line in ("import os, time", *lines))
        return text[: entry.end()] + inserted + text[entry.end() :]

    return change


def instead_of(old: str, new: str) -> Sabotage:
    """Text of the module replaced everywhere; it must be there."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def without(line: str) -> Sabotage:
    """The module without a line, or without the loop that it begins."""
    instead = "while False:" if line.strip().startswith("while") else "pass"

    def change(text: str) -> str:
        assert line in text.split("\n")
        return "\n".join(one.replace(line.strip(), instead) if one == line else one for one in text.split("\n"))

    return change


def log_launches(log: Path) -> Sabotage:
    """Write the process id and the batch size of each launch to a file; the kernel stays right."""
    return before_each_launch(f"with open({str(log)!r}, 'a') as file:", "    print(os.getpid(), q.shape[0], file=file)")


def launches(log: Path) -> list[tuple[int, int]]:
    """(process id, batch size) of each launch that `log_launches` wrote."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(pid), int(batch)) for pid, batch in (line.split() for line in lines)]


def render_with(sabotages: Mapping[Candidate, Sabotage]) -> Render:
    """Stands for `render`: changes the modules of some candidates and renders the others as they are."""

    def sabotaged_render(candidate: Candidate) -> KernelSource:
        source = render(candidate)
        sabotage = sabotages.get(candidate)
        if sabotage is None:
            return source
        text = sabotage(source.text)
        digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
        return replace(source, text=text, digest=digest, name=f"fwd_{digest}")

    return sabotaged_render
