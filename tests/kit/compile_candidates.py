"""Compiles candidates side by side, as a search does, for tests of what templates compile to."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fa_autotune.kernels.compiler import CompilePool, CompileResult
from fa_autotune.kernels.gates import CompileRequest
from fa_autotune.kernels.modules import write_module
from fa_autotune.kernels.render import render
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import compile_form
from kit.releases import gate_of_default

PATIENCE_S = 240.0
CompileAll = Callable[[Sequence[Candidate], str, int], list[CompileResult]]  # for an arch and its shared memory


def request_of(candidate: Candidate, folder: Path, arch: str, smem_limit_bytes: int) -> CompileRequest:
    """What a search asks of the compilers for a candidate, whose module is written to a folder."""
    return CompileRequest(
        module=write_module(render(candidate), folder),
        arch=arch,
        form=compile_form(candidate.family),
        variant=candidate.variant,
        smem_limit_bytes=smem_limit_bytes,
    )


def compiling(pool: CompilePool, folder: Path) -> CompileAll:
    """A function that compiles candidates for an arch with so many bytes of shared memory."""

    def compile_all(candidates: Sequence[Candidate], arch: str, smem_limit_bytes: int) -> list[CompileResult]:
        requests = [request_of(candidate, folder, arch, smem_limit_bytes) for candidate in candidates]
        return [future.result() for future in map(pool.submit, requests)]

    return compile_all


def unexpected(arch: str, candidates: Sequence[Candidate], results: Sequence[CompileResult]) -> dict[str, object]:
    """Defaults that did not compile, or that a gate stopped, unless this release is known for it; then, that passed."""
    return {
        f"{candidate.family.label} {candidate.variant} {candidate.config}": (
            result.status.value,
            result.gate,
            result.error,
        )
        for candidate, result in zip(candidates, results, strict=True)
        if (result.status is TrialStatus.OK, result.gate) != ((gate := gate_of_default(candidate, arch)) is None, gate)
    }
