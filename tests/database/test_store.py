"""The database: what is saved comes back, and winners are the newest confirmed."""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_autotune.database import Miss, SessionKind, SessionState, TuningDatabase
from fa_autotune.database.reader import TABLES
from fa_autotune.database.rows import MAX_ERROR
from fa_autotune.database.schema import SCHEMA_VERSION
from fa_autotune.errors import DatabaseError, FaAutotuneError, InvalidProblemError
from fa_autotune.problem.device import KNOWN_DEVICES, Toolchain
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, ResourceReport, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import HopperWsBwdConfig
from fa_autotune.space.registry import compile_form
from kit.database_files import records
from kit.strategies import candidates, devices, fitting, shapes
from kit.tuning_samples import (
    ACCURACY,
    H200,
    OTHER_PROBLEM,
    PROBLEM,
    RESOURCES,
    TOOLCHAIN,
    begin,
    confirmed,
    failed_record,
    fill,
    measurement,
    ok_record,
)

SIBLING_PROBLEM = AttentionProblem.parse("4x32x8x2048x2048x128,causal")  # of PROBLEM's family


@pytest.fixture(params=["memory", "file"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TuningDatabase]:
    with TuningDatabase(":memory:" if request.param == "memory" else tmp_path / "new" / "tuning.db") as opened:
        yield opened


class TestContract:
    """What holds in memory and in a file alike."""

    def test_a_saved_record_comes_back_equal(self, database: TuningDatabase) -> None:
        trial_id = database.save_trial(begin(database), ok_record())
        (trial,) = database.trials()
        assert (trial.record, trial.trial_id) == (ok_record(), trial_id)

    def test_a_problem_with_an_option_comes_back_with_it(self, database: TuningDatabase) -> None:
        problem = PROBLEM.for_pass(Pass.BWD_FUSED, unordered=True)
        candidate = Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=HopperWsBwdConfig())
        record = replace(ok_record(), candidate=candidate, problem=problem)
        database.save_trial(begin(database), record)
        assert records(database) == [record]
        database.add_misses([Miss(problem=problem, device_fingerprint=H200.fingerprint, count=2)])
        assert [miss.problem for miss in database.misses()] == [problem]

    def test_a_trial_knows_its_device_and_toolchain(self, database: TuningDatabase) -> None:
        device = replace(H200, power_limit_w=700.0)
        database.save_trial(begin(database, device=device), ok_record())
        (trial,) = database.trials()
        assert (trial.device, trial.toolchain) == (device, TOOLCHAIN)

    def test_saving_again_replaces_the_trial(self, database: TuningDatabase) -> None:
        session = begin(database)
        assert database.save_trial(session, ok_record(2.0)) == database.save_trial(session, ok_record(1.0))
        assert records(database) == [ok_record(1.0)]

    def test_trials_prefer_the_newest_screen_measurement(self, database: TuningDatabase) -> None:
        for record in (ok_record(2.0), ok_record(1.5), confirmed(1.0, 1)):
            database.save_trial(begin(database), record)
        assert records(database) == [ok_record(1.5)]

    def test_trials_without_a_screen_show_the_newest_confirm(self, database: TuningDatabase) -> None:
        for record in (confirmed(1.0, 2), confirmed(1.1, 1)):
            database.save_trial(begin(database, SessionKind.CONFIRM), record)
        assert records(database) == [confirmed(1.1, 1)]

    def test_a_trial_that_fails_later_has_no_measurement(self, database: TuningDatabase) -> None:
        database.save_trial(begin(database), ok_record())
        failure = replace(ok_record(), status=TrialStatus.CRASHED, measurement=None, error="signal 11")
        database.save_trial(begin(database), failure)
        assert records(database) == [failure]

    def test_trials_come_in_the_order_in_which_they_ended(self, database: TuningDatabase) -> None:
        session = begin(database)
        for block_m in (64, 16, 32):
            database.save_trial(session, ok_record(1.0, block_m))
        assert [record.candidate.config.BLOCK_M for record in records(database)] == [64, 16, 32]

    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            ({"device": H200}, 3),
            ({"device": KNOWN_DEVICES["t4"]}, 0),
            ({"problem": PROBLEM}, 2),
            ({"variant": Variant.TMA}, 1),
            ({"statuses": {TrialStatus.OK}}, 2),
            ({"statuses": {TrialStatus.OK, TrialStatus.TIMED_OUT}}, 3),
            ({"statuses": set()}, 0),
            ({"toolchain": replace(TOOLCHAIN, torch="9.9")}, 3),
            ({"toolchain": replace(TOOLCHAIN, triton="3.6.0")}, 0),
            ({"problem": OTHER_PROBLEM, "variant": Variant.PORTABLE}, 0),
        ],
    )
    def test_a_filter_keeps_what_it_names(
        self, database: TuningDatabase, filters: dict[str, Any], expected: int
    ) -> None:
        session = begin(database)
        database.save_trial(session, ok_record())
        database.save_trial(session, failed_record(TrialStatus.TIMED_OUT, 128))
        database.save_trial(session, ok_record(problem=OTHER_PROBLEM, variant=Variant.TMA))
        assert len(database.trials(**filters)) == expected

    def test_a_rejection_is_forgotten_once_the_candidate_is_tried(self, database: TuningDatabase) -> None:
        session = begin(database)
        database.save_trial(session, failed_record(TrialStatus.REJECTED))
        database.save_trial(session, ok_record())
        assert records(database) == [ok_record()]

    def test_a_rejection_on_one_problem_outlives_a_trial_on_another(self, database: TuningDatabase) -> None:
        other = AttentionProblem(family=PROBLEM.family, shape=replace(PROBLEM.shape, batch_size=1))
        session = begin(database)
        database.save_trial(session, failed_record(TrialStatus.REJECTED))
        database.save_trial(session, ok_record(problem=other))
        assert records(database) == [failed_record(TrialStatus.REJECTED), ok_record(problem=other)]

    def test_another_digest_of_the_same_config_is_another_trial(self, database: TuningDatabase) -> None:
        session = begin(database)
        database.save_trial(session, ok_record(digest="aaaa"))
        database.save_trial(session, ok_record(digest="bbbb"))
        assert [record.kernel_digest for record in records(database)] == ["aaaa", "bbbb"]

    def test_a_long_error_keeps_its_beginning_and_end(self, database: TuningDatabase) -> None:
        database.save_trial(begin(database), failed_record(TrialStatus.CRASHED, error="first" + "x" * 20_000 + "last"))
        (record,) = records(database)
        assert record.error is not None
        assert (len(record.error), record.error[:5], record.error[-4:]) == (MAX_ERROR, "first", "last")

    def test_an_error_loses_what_could_steer_a_terminal(self, database: TuningDatabase) -> None:
        database.save_trial(begin(database), failed_record(TrialStatus.CRASHED, error="a\x1b[31mb\0c\ud800d\ne"))
        assert records(database)[0].error == "a\ufffd[31mb\ufffdc\ufffdd\ne"

    def test_a_figure_that_is_not_finite_comes_back_as_beyond_bounds(self, database: TuningDatabase) -> None:
        accuracy = replace(ACCURACY, max_error=math.nan, max_error_ratio=math.inf, failures=("out has NaN",))
        database.save_trial(begin(database), failed_record(TrialStatus.WRONG_RESULT, accuracy=accuracy))
        assert records(database)[0].accuracy == replace(accuracy, max_error=math.inf)

    @pytest.mark.parametrize("median_ms", [math.nan, math.inf, 0.0, -1.0])
    def test_a_time_that_is_none_is_refused_and_nothing_is_saved(
        self, database: TuningDatabase, median_ms: float
    ) -> None:
        session = begin(database)
        with pytest.raises(DatabaseError, match="median_ms"):
            database.save_trial(session, ok_record(median_ms, p20_ms=1.0, p80_ms=1.0))
        assert database.info().counts["kernels"] == 0

    def test_a_record_of_two_families_is_refused(self, database: TuningDatabase) -> None:
        with pytest.raises(InvalidProblemError, match="candidate's family"):
            database.save_trial(begin(database), replace(ok_record(), problem=OTHER_PROBLEM))

    def test_a_trial_of_a_session_that_was_not_begun_is_an_error(self, database: TuningDatabase) -> None:
        with pytest.raises(DatabaseError, match="no session 7"):
            database.save_trial(7, ok_record())

    def test_ending_a_session_that_was_not_begun_is_an_error(self, database: TuningDatabase) -> None:
        with pytest.raises(DatabaseError, match="no session 7"):
            database.end_session(7, state=SessionState.FINISHED)

    def test_info_counts_and_names_the_last_session(self, database: TuningDatabase) -> None:
        fill(database)
        info = database.info()
        assert info.counts == {
            **dict.fromkeys(TABLES, 0),
            **{
                "devices": 1,
                "toolchains": 1,
                "problems": 1,
                "sessions": 2,
                "kernels": 5,
                "trials": 5,
                "measurements": 5,
            },
        }
        assert info.last_session is not None
        assert (info.last_session.kind, info.last_session.state) == (SessionKind.CONFIRM, SessionState.FINISHED)
        assert (info.schema_version, info.devices) == (SCHEMA_VERSION, (H200,))

    def test_misses_of_a_problem_add_up(self, database: TuningDatabase) -> None:
        early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)
        for count, seen in ((2, late), (3, early)):
            database.add_misses([Miss(problem=PROBLEM, device_fingerprint="d", count=count, last_seen=seen)])
        assert database.misses() == [Miss(problem=PROBLEM, device_fingerprint="d", count=5, last_seen=late)]

    def test_misses_are_cleared_by_device_and_problem(self, database: TuningDatabase) -> None:
        t4 = KNOWN_DEVICES["t4"]
        kept = [Miss(problem=OTHER_PROBLEM, device_fingerprint=H200.fingerprint)]
        kept += [Miss(problem=PROBLEM, device_fingerprint=t4.fingerprint)]
        database.add_misses([*kept, Miss(problem=PROBLEM, device_fingerprint=H200.fingerprint)])
        assert database.clear_misses(device=H200, problem=PROBLEM) == 1
        assert {(miss.problem, miss.device_fingerprint) for miss in database.misses()} == {
            (miss.problem, miss.device_fingerprint) for miss in kept
        }

    def test_the_leaderboard_lists_the_fastest_first(self, database: TuningDatabase) -> None:
        fill(database)
        found = [
            (entry.position, entry.candidate.config.BLOCK_M, entry.role) for entry in database.leaderboard(PROBLEM)
        ]
        assert found == [(1, 64, Role.CONFIRM), (2, 32, Role.CONFIRM), (3, 16, Role.SCREEN)]

    def test_the_leaderboard_ends_at_its_limit(self, database: TuningDatabase) -> None:
        fill(database)
        assert [entry.position for entry in database.leaderboard(PROBLEM, limit=2)] == [1, 2]

    def test_the_leaderboard_takes_any_limit(self, database: TuningDatabase) -> None:
        fill(database)
        assert len(database.leaderboard(PROBLEM, limit=10**6)) == 3

    def test_regimes_are_never_ranked_together(self, database: TuningDatabase) -> None:
        session = begin(database)
        database.save_trial(session, ok_record(1.0, 16, regime=Regime.EVENTS))
        database.save_trial(session, ok_record(0.5, 32, regime=Regime.GRAPH))
        assert [(entry.regime, entry.position) for entry in database.leaderboard(PROBLEM)] == [
            (Regime.EVENTS, 1),
            (Regime.GRAPH, 1),
        ]

    def test_rejections_are_counted_by_status_and_constraint(self, database: TuningDatabase) -> None:
        session = begin(database)
        for block_m in (64, 128):
            database.save_trial(session, failed_record(TrialStatus.REJECTED, block_m))
        database.save_trial(session, failed_record(TrialStatus.CRASHED, 256))
        database.save_trial(session, ok_record(1.0, 16))
        assert [(row.status, row.constraint, row.trials) for row in database.rejections()] == [
            (TrialStatus.REJECTED, "shared_memory", 2),
            (TrialStatus.CRASHED, None, 1),
        ]


class TestWinners:
    """Rank 1 of the newest confirm session of each device, problem and variant."""

    def test_the_winner_is_rank_one_not_the_fastest_number(self, database: TuningDatabase) -> None:
        session = begin(database, SessionKind.CONFIRM)
        database.save_trial(session, confirmed(1.01, 1, 32))
        database.save_trial(session, confirmed(1.0, 2, 64))
        (winner,) = database.winners()
        assert (winner.candidate.config.BLOCK_M, winner.median_ms) == (32, 1.01)

    def test_a_newer_session_dethrones_a_faster_winner(self, database: TuningDatabase) -> None:
        for median_ms, block_m in ((0.5, 32), (1.0, 64)):
            database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(median_ms, 1, block_m))
        (winner,) = database.winners()
        assert winner.candidate.config.BLOCK_M == 64

    def test_a_screen_alone_makes_no_winner(self, database: TuningDatabase) -> None:
        database.save_trial(begin(database), ok_record())
        assert database.winners() == []

    def test_each_variant_has_its_winner(self, database: TuningDatabase) -> None:
        session = begin(database, SessionKind.CONFIRM)
        for variant in (Variant.PORTABLE, Variant.TMA):
            database.save_trial(session, confirmed(1.0, 1, variant=variant))
        assert {winner.candidate.variant for winner in database.winners()} == {Variant.PORTABLE, Variant.TMA}

    def test_a_winner_that_fails_later_gives_way_to_the_session_before(self, database: TuningDatabase) -> None:
        for block_m in (32, 64):
            database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(1.0, 1, block_m))
        database.save_trial(begin(database, SessionKind.RECHECK), failed_record(TrialStatus.WRONG_RESULT, 64))
        assert [winner.candidate.config.BLOCK_M for winner in database.winners()] == [32]

    def test_a_session_of_another_device_dethrones_nobody(self, database: TuningDatabase) -> None:
        for device in (H200, KNOWN_DEVICES["h100"]):
            database.save_trial(begin(database, SessionKind.CONFIRM, device=device), confirmed(1.0, 1))
        assert len(database.winners()) == 2
        assert [winner.device_name for winner in database.winners(device=H200)] == [H200.name]

    def test_each_release_of_triton_has_its_winner(self, database: TuningDatabase) -> None:
        for triton, median_ms in (("3.6.0", 1.0), ("3.10.0", 2.0), ("3.6.1+cu130", 3.0)):
            toolchain = Toolchain(triton=triton)
            database.save_trial(begin(database, SessionKind.CONFIRM, toolchain=toolchain), confirmed(median_ms, 1))
        assert [(winner.toolchain.triton, winner.median_ms) for winner in database.winners()] == [
            ("3.10.0", 2.0),
            ("3.6.1+cu130", 3.0),
        ]

    def test_a_winner_keeps_its_time_when_its_text_changes_and_its_code_does_not(
        self, database: TuningDatabase
    ) -> None:
        database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(1.0, 1, digest="old"))
        ((key, (kernel, toolchain)),) = database.kernels_of_winners().items()
        assert (kernel.digest, toolchain.triton) == ("old", TOOLCHAIN.triton)
        assert database.renew_kernel(key, "new")
        assert database.renew_kernel(key, "newer")
        (winner,) = database.winners()
        assert (winner.kernel_digest, winner.measured_as, winner.median_ms) == ("newer", "old", 1.0)
        assert database.renew_kernel(key, "old")
        assert [winner.measured_as for winner in database.winners()] == [None]  # it is what was timed, again
        assert database.renew_kernel(key, "newer")
        database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(2.0, 1, digest="newer"))
        assert [(winner.measured_as, winner.median_ms) for winner in database.winners()] == [(None, 2.0)]

    def test_a_text_that_has_a_kernel_already_gets_its_winners(self, database: TuningDatabase) -> None:
        session = begin(database, SessionKind.CONFIRM)
        for problem, digest in ((PROBLEM, "old"), (SIBLING_PROBLEM, "new")):
            database.save_trial(session, confirmed(1.0, 1, problem=problem, digest=digest))
        (key,) = [key for key, (kernel, _) in database.kernels_of_winners().items() if kernel.digest == "old"]
        assert database.renew_kernel(key, "new")
        assert [(row.kernel_digest, row.measured_as) for row in database.winners()] == [("new", "old")] * 2
        assert database.info().counts["kernels"] == 1

    def test_of_two_trials_of_a_problem_one_keeps_the_times_of_both(self, database: TuningDatabase) -> None:
        for digest in ("new", "old"):
            database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(1.0, 1, digest=digest))
        (key,) = database.kernels_of_winners()
        assert database.renew_kernel(key, "new")
        (winner,) = database.winners()
        assert (winner.kernel_digest, winner.session_id) == ("new", 2)
        assert [database.info().counts[table] for table in ("kernels", "trials", "measurements")] == [1, 1, 2]

    def test_a_text_that_failed_on_a_problem_gets_no_times_there(self, database: TuningDatabase) -> None:
        database.save_trial(begin(database), failed_record(TrialStatus.WRONG_RESULT, kernel_digest="new"))
        database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(1.0, 1, digest="old"))
        (key,) = database.kernels_of_winners()
        assert not database.renew_kernel(key, "new")
        assert [winner.kernel_digest for winner in database.winners()] == ["old"]

    def test_a_measurement_tells_of_no_older_text_unless_others_remain(self, database: TuningDatabase) -> None:
        session = begin(database, SessionKind.CONFIRM)
        for problem in (PROBLEM, SIBLING_PROBLEM):
            database.save_trial(session, confirmed(1.0, 1, problem=problem, digest="old"))
            for key in database.kernels_of_winners():
                database.renew_kernel(key, "new")
        assert {winner.measured_as for winner in database.winners()} == {"old"}
        database.save_trial(session, confirmed(1.0, 1, digest="new"))
        assert {winner.measured_as for winner in database.winners()} == {"old"}

    def test_machine_code_is_named_once(self, database: TuningDatabase) -> None:
        database.save_trial(begin(database, SessionKind.CONFIRM), confirmed(1.0, 1))
        (key,) = database.kernels_of_winners()
        for code in ("first", "second"):
            database.name_machine_code(key, code)
        ((kernel, _),) = database.kernels_of_winners().values()
        assert kernel.resources is not None
        assert kernel.resources.code_digest == "first"

    def test_a_winner_carries_what_the_view_says(self, database: TuningDatabase) -> None:
        session = begin(database, SessionKind.CONFIRM)
        trial_id = database.save_trial(session, confirmed(1.0, 1))
        (winner,) = database.winners(problem=PROBLEM, variant=Variant.PORTABLE)
        assert (winner.toolchain, winner.form, winner.regime) == (TOOLCHAIN, CompileForm.ALIGNED, Regime.EVENTS)
        assert (winner.registers, winner.spill_bytes, winner.smem_bytes) == (168, 0, 98304)
        assert (winner.session_id, winner.trial_id, winner.p20_ms, winner.p80_ms) == (session, trial_id, 0.75, 1.25)


def finite(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


PRINTABLE = st.text(
    st.characters(exclude_categories=("C", "Zl", "Zp", "Zs")) | st.sampled_from(" "), min_size=1, max_size=40
)
NOTES = st.lists(PRINTABLE, max_size=3).map(tuple)
RESOURCE_REPORTS = st.builds(
    ResourceReport,
    registers=st.none() | st.integers(0, 255),
    spill_bytes=st.integers(0, 2**20),
    smem_bytes=st.integers(0, 2**20),
    compile_s=finite(0, 1e4),
    warnings=NOTES,
)
ACCURACY_REPORTS = st.builds(
    AccuracyReport,
    max_error=finite(0, 1e30) | st.just(math.inf),
    max_error_ratio=finite(0, 1e30),
    mean_error_ratio=finite(0, 1e30),
    lse_error=finite(0, 1e30),
    probes=st.integers(0, 99),
    failures=NOTES,
)
MEASUREMENTS = st.builds(
    lambda times_ms, **others: Measurement(
        **dict(zip(("p20_ms", "median_ms", "p80_ms"), times_ms, strict=True)), **others
    ),
    st.lists(finite(1e-6, 1e8), min_size=3, max_size=3).map(sorted),
    role=st.sampled_from(Role),
    regime=st.sampled_from(Regime),
    launches=st.integers(1, 10**6),
    early_stopped=st.booleans(),
    rank=st.none() | st.integers(1, 99),
    sm_clock_mhz=st.none() | st.integers(0, 5000),
    power_w=st.none() | finite(0, 2000),
    temperature_c=st.none() | st.integers(-40, 120),
)


@st.composite
def trial_records(draw: st.DrawFn) -> TrialRecord:
    candidate, status = draw(candidates()), draw(st.sampled_from(TrialStatus))
    digests = st.text("0123456789abcdef", min_size=8, max_size=64)
    return TrialRecord(
        candidate=candidate,
        problem=fitting(candidate.family, draw(shapes())),
        status=status,
        form=compile_form(candidate.family),
        kernel_digest=draw(digests if status is TrialStatus.OK else st.none() | digests),
        resources=draw(st.none() | RESOURCE_REPORTS),
        accuracy=draw(st.none() | ACCURACY_REPORTS),
        measurement=draw(MEASUREMENTS) if status is TrialStatus.OK else None,
        error=draw(st.none() | PRINTABLE),
        constraint=draw(st.none() | PRINTABLE),
        duration_s=draw(finite(0, 1e6)),
    )


@given(record=trial_records(), device=devices(), power=st.none() | finite(1, 2000))
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_any_record_survives_the_database_and_a_pack(record: TrialRecord, device: Any, power: float | None) -> None:
    device = replace(device, power_limit_w=power)
    with (
        tempfile.TemporaryDirectory() as folder,
        TuningDatabase(":memory:") as first,
        TuningDatabase(":memory:") as last,
    ):
        first.save_trial(begin(first, device=device), record)
        first.export(Path(folder) / "pack.db", winners_only=False)
        last.import_pack(Path(folder) / "pack.db")
        (saved,), (imported,) = first.trials(), last.trials()
    assert (saved.record, saved.device, saved.record.duration_s) == (record, device, record.duration_s)
    assert imported == replace(saved, trial_id=imported.trial_id)


def test_a_resource_report_of_another_trial_is_kept(tmp_path: Path) -> None:
    with TuningDatabase(tmp_path / "a.db") as database:
        session = begin(database)
        database.save_trial(session, ok_record())
        database.save_trial(session, replace(ok_record(), status=TrialStatus.CRASHED, resources=None, measurement=None))
        assert records(database)[0].resources == RESOURCES


def test_an_early_stopped_measurement_says_so(tmp_path: Path) -> None:
    with TuningDatabase(tmp_path / "a.db") as database:
        database.save_trial(begin(database), replace(ok_record(), measurement=measurement(early_stopped=True)))
        assert database.leaderboard(PROBLEM)[0].early_stopped


@pytest.mark.parametrize("path", ["/a\0b", None, 5], ids=repr)
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(FaAutotuneError, match="is no path of a file"):
        TuningDatabase(path)
