"""Winners of another text: what their machine code says of them. Compiling is stood in for, but for one kernel."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from fa_autotune.database import SessionKind, TuningDatabase
from fa_autotune.database.entries import KernelRow
from fa_autotune.errors import MachineError, TemplateError
from fa_autotune.evaluation.recheck import Recheck, code_digests, recheck
from fa_autotune.problem.device import Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Role
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import BwdDeltaConfig
from fa_autotune.space.registry import compile_form
from kit.tuning_samples import RESOURCES, TOOLCHAIN, begin, confirmed, measurement

CODE = "5a55c0de"


@pytest.fixture
def database() -> Iterator[TuningDatabase]:
    with TuningDatabase(":memory:") as opened:
        yield opened


def win(database: TuningDatabase, *, digest: str = "old", code: str | None = CODE, triton: str = "3.7.1") -> None:
    record = replace(confirmed(1.0, 1, digest=digest), resources=replace(RESOURCES, code_digest=code))
    database.save_trial(begin(database, SessionKind.CONFIRM, toolchain=Toolchain(triton=triton)), record)


def compiling_to(*codes: str | None) -> Callable[[Iterable[KernelRow]], Iterator[tuple[KernelRow, str | None]]]:
    def compile_all(kernels: Iterable[KernelRow]) -> Iterator[tuple[KernelRow, str | None]]:
        yield from zip(kernels, codes, strict=True)

    return compile_all


def look(database: TuningDatabase, *codes: str | None, digest: Callable[[Candidate], str] = lambda _: "new") -> Recheck:
    return recheck(database, triton=TOOLCHAIN.triton, digest=digest, compile_all=compiling_to(*codes))


def test_the_same_machine_code_makes_a_winner_fresh(database: TuningDatabase) -> None:
    win(database)
    assert look(database, CODE) == Recheck(renewed=1)
    (winner,) = database.winners()
    assert (winner.kernel_digest, winner.measured_as) == ("new", "old")
    assert look(database) == Recheck(fresh=1)


@pytest.mark.parametrize("code", ["other", None])
def test_other_machine_code_changes_nothing(database: TuningDatabase, code: str | None) -> None:
    win(database)
    assert look(database, code) == Recheck(changed=1)
    assert database.winners()[0].kernel_digest == "old"


def test_a_kernel_whose_code_was_never_known_is_not_compiled(database: TuningDatabase) -> None:
    win(database, code=None)
    assert look(database) == Recheck(changed=1)


def test_another_release_of_triton_is_left_alone(database: TuningDatabase) -> None:
    win(database, triton="3.6.0")
    assert look(database) == Recheck(other_release=1)


def test_a_patch_of_the_release_is_looked_at(database: TuningDatabase) -> None:
    win(database, triton="3.7.0")
    assert look(database, CODE) == Recheck(renewed=1)


def test_a_kernel_of_todays_text_learns_its_machine_code(database: TuningDatabase) -> None:
    win(database, digest="new", code=None)
    assert look(database, CODE) == Recheck(fresh=1)
    ((kernel, _),) = database.kernels_of_winners().values()
    assert kernel.resources is not None
    assert kernel.resources.code_digest == CODE


def test_what_was_found_is_kept_where_a_fault_ends_it(database: TuningDatabase) -> None:
    def full_disk(kernels: Iterable[KernelRow]) -> Iterator[tuple[KernelRow, str | None]]:
        first, *_ = kernels
        yield first, CODE
        raise MachineError("No space left on device")

    for block_m in (64, 128):
        record = replace(confirmed(1.0, 1, block_m, digest="old"), resources=replace(RESOURCES, code_digest=CODE))
        problem = AttentionProblem.parse(f"4x32x8x{64 * block_m}x4096x128,causal")
        database.save_trial(begin(database, SessionKind.CONFIRM), replace(record, problem=problem))
    with pytest.raises(MachineError):
        recheck(database, triton=TOOLCHAIN.triton, digest=lambda _: "new", compile_all=full_disk)
    assert sorted(winner.kernel_digest or "" for winner in database.winners()) == ["new", "old"]


def test_a_kernel_that_no_longer_renders_has_changed(database: TuningDatabase) -> None:
    def gone(candidate: Candidate) -> str:
        raise TemplateError("gone")

    win(database)
    assert look(database, digest=gone) == Recheck(changed=1)


def test_a_kernel_is_compiled_for_its_own_arch(database: TuningDatabase) -> None:
    problem = AttentionProblem.parse("1x2x2x64x64x32,bwd_delta")
    config = BwdDeltaConfig(BLOCK_M=32, num_warps=4)
    candidate = Candidate(family=problem.family, variant=Variant.PORTABLE, config=config)
    record = replace(
        confirmed(1.0, 1),
        candidate=candidate,
        problem=problem,
        form=compile_form(problem.family),
        measurement=measurement(1.0, role=Role.CONFIRM, rank=1),
    )
    database.save_trial(begin(database, SessionKind.CONFIRM), record)
    ((kernel, _),) = database.kernels_of_winners().values()
    (first,) = (code for _, code in code_digests([kernel]))
    (other,) = (code for _, code in code_digests([replace(kernel, arch="sm_80")]))
    assert first
    assert other
    assert first != other
