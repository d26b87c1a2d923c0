"""Winners whose kernel's text has changed: where today's text compiles to the same machine code, their times hold."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fa_autotune.database import TuningDatabase
from fa_autotune.database.entries import KernelRow
from fa_autotune.errors import FaAutotuneError
from fa_autotune.kernels.compiler import CompilePool
from fa_autotune.kernels.gates import CompileRequest
from fa_autotune.kernels.modules import candidates_dir, write_module
from fa_autotune.kernels.render import render, rendered_digest
from fa_autotune.problem.device import Toolchain
from fa_autotune.space.candidate import Candidate

_NO_LIMIT_BYTES = 2**31  # whether a kernel fits its GPU was seen when it was measured

CodeDigests = Callable[[Iterable[KernelRow]], Iterator[tuple[KernelRow, str | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """What became of the kernels that won, by their number.

    `fresh`: of today's text. `renewed`: another text, the same machine code, so the row has today's digest now.
    `changed`: other machine code, or none that is known; they are to be measured again. `other_release`: compiled by
    another release of Triton than this one, not looked at.
    """

    fresh: int = 0
    renewed: int = 0
    changed: int = 0
    other_release: int = 0


def recheck(
    database: TuningDatabase,
    *,
    triton: str,
    digest: Callable[[Candidate], str] = rendered_digest,
    compile_all: "CodeDigests | None" = None,
) -> Recheck:
    """Give the winners' kernels that only their text keeps from being fresh the digest of today's text.

    A fresh kernel whose machine code is not known yet is compiled and gets its digest, so that the next change of the
    text can be told from a change of the code. Needs no GPU. What is found is saved at once, whatever ends it later.
    `digest` and `compile_all` are for tests.
    """
    release = Toolchain(triton=triton).triton_release
    found = database.kernels_of_winners()
    here = {key: row for key, (row, toolchain) in found.items() if toolchain.triton_release == release}
    today = {key: _digest_or_none(digest, row.candidate) for key, row in here.items()}
    fresh = {key for key, row in here.items() if row.digest == today[key]}
    known = {key: row.resources.code_digest if row.resources else None for key, row in here.items()}
    wanted = {key for key in here if today[key] and (known[key] is None) == (key in fresh)}
    renewed = 0
    for key, code in _by_key({key: here[key] for key in sorted(wanted)}, compile_all or code_digests):
        if code is None:
            continue
        if key in fresh:
            if found[key][1].triton == triton:  # a patch of the release may make other code
                database.name_machine_code(key, code)
        elif code == known[key]:
            new_digest = today[key]
            assert new_digest is not None  # or it would not have been compiled
            renewed += database.renew_kernel(key, new_digest)
    return Recheck(
        fresh=len(fresh),
        renewed=renewed,
        changed=len(here) - len(fresh) - renewed,
        other_release=len(found) - len(here),
    )


def code_digests(kernels: Iterable[KernelRow]) -> Iterator[tuple[KernelRow, str | None]]:
    """Compile today's text of kernels, each for its own arch; their machine code's digest, None where none compiles."""
    with CompilePool() as pool:
        waiting = [(kernel, pool.submit(_request(kernel))) for kernel in kernels]
        for kernel, future in waiting:
            resources = future.result().resources
            yield kernel, resources.code_digest if resources else None


def _by_key(kernels: Mapping[int, KernelRow], compile_all: CodeDigests) -> Iterator[tuple[int, str | None]]:
    for key, (_, code) in zip(kernels, compile_all(kernels.values()), strict=True):
        yield key, code


def _digest_or_none(digest: Callable[[Candidate], str], candidate: Candidate) -> str | None:
    try:
        return digest(candidate)
    except FaAutotuneError:  # today's templates have no such kernel
        return None


def _request(kernel: KernelRow) -> CompileRequest:
    return CompileRequest(
        module=write_module(render(kernel.candidate), candidates_dir()),
        arch=kernel.arch,
        form=kernel.form,
        variant=kernel.candidate.variant,
        smem_limit_bytes=_NO_LIMIT_BYTES,
    )
