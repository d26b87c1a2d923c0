"""Putting dataclasses into rows, and rows into a database.

The `put_` functions work inside the caller's transaction; they find a row by what identifies it, or add it.
"""

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from fa_autotune.database.entries import (
    CompileStatus,
    KernelRow,
    MeasurementRow,
    SessionRow,
    SessionState,
    TrialRow,
)
from fa_autotune.database.rows import (
    COLUMNS,
    MAX_ERROR,
    MAX_NAME,
    MAX_NOTES,
    Row,
    clean_text,
    kernel_from,
    knob_columns,
    measurement_from,
    problem_columns,
    trial_from,
)
from fa_autotune.errors import DatabaseError, InvalidPackError
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.family import canonical_json
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialRecord, TrialStatus
from fa_autotune.space.config import config_key

Values = dict[str, str | int | float | None]


def device_values(device: DeviceSpec) -> Values:
    """The columns of `devices`; the power limit is a session's."""
    names = (name for name in COLUMNS["devices"] if name not in ("id", "name"))
    return {"name": clean_text(device.name, MAX_NAME), **{name: getattr(device, name) for name in names}}


def toolchain_values(toolchain: Toolchain) -> Values:
    """The columns of `toolchains`; the torch version is a session's."""
    identity: Values = {"triton": toolchain.triton, "cuda": toolchain.cuda, "driver": toolchain.driver}
    return {"key": canonical_json(identity), **identity}


def problem_values(problem: AttentionProblem) -> Values:
    """The columns of `problems`."""
    return {"key": problem.key, **problem_columns(problem)}


def kernel_of(record: TrialRecord, arch: str) -> KernelRow:
    """The kernel that a record is about."""
    compiled = (TrialStatus.OK, TrialStatus.WRONG_RESULT, TrialStatus.OVER_RESOURCES, TrialStatus.LAUNCH_FAILED)
    if record.status is TrialStatus.COMPILE_FAILED:
        status = CompileStatus.FAILED
    elif record.resources is not None or record.status in compiled:
        status = CompileStatus.COMPILED
    else:
        status = CompileStatus.NOT_COMPILED
    return KernelRow(
        candidate=record.candidate,
        arch=arch,
        form=record.form,
        digest=record.kernel_digest,
        compile_status=status,
        resources=record.resources,
    )


def kernel_identity(kernel: KernelRow) -> Values:
    """What tells a kernel from others, beside its toolchain."""
    return {
        "family": kernel.candidate.family.key,
        "variant": kernel.candidate.variant.value,
        "config": config_key(kernel.candidate.config),
        "arch": kernel.arch,
        "form": kernel.form.value,
        "digest": kernel.digest,
    }


def kernel_outcome(kernel: KernelRow) -> Values:
    """What the compiler said, in the columns of `kernels`."""
    found = kernel.resources
    names = ("registers", "spill_bytes", "smem_bytes", "compile_s", "code_digest")
    return {
        "compile_status": kernel.compile_status.value,
        "measured_as": kernel.measured_as,
        **{name: getattr(found, name, None) for name in names},
        "compile_warnings": None if found is None else _notes_text(found.warnings),
    }


def trial_of(record: TrialRecord, ended_at: str) -> TrialRow:
    """The trial that a record is."""
    return TrialRow(
        status=record.status,
        constraint=record.constraint,
        error=record.error,
        accuracy=record.accuracy,
        duration_s=record.duration_s,
        ended_at=ended_at,
    )


def trial_values(trial: TrialRow) -> Values:
    """The columns of `trials` that say how it ended. A figure that is not finite becomes NULL."""
    accuracy = trial.accuracy
    values: Values = {
        "status": trial.status.value,
        "constraint_name": trial.constraint and clean_text(trial.constraint, MAX_NAME),
        "error": None if trial.error is None else clean_text(trial.error, MAX_ERROR),
        "duration_s": float(trial.duration_s),
        "ended_at": trial.ended_at,
        "probes": None if accuracy is None else accuracy.probes,
        "accuracy_failures": None if accuracy is None else _notes_text(accuracy.failures),
    }
    for name in ("max_error", "max_error_ratio", "mean_error_ratio", "lse_error"):
        value = getattr(accuracy, name, None)
        values[name] = value if value is not None and math.isfinite(value) else None
    return values


def measurement_values(row: MeasurementRow) -> Values:
    """The columns of `measurements`."""
    names = (name for name in COLUMNS["measurements"] if name not in ("id", "trial_id", "session_id", "measured_at"))
    values: Values = {name: getattr(row.measurement, name) for name in names}
    times = {name: float(getattr(row.measurement, name)) for name in ("p20_ms", "median_ms", "p80_ms")}
    return {**values, **times, "early_stopped": int(row.measurement.early_stopped), "measured_at": row.measured_at}


def session_values(session: SessionRow) -> Values:
    """The columns of `sessions` that hold in any database."""
    names = ("uid", "kind", "state", "torch", "power_limit_w", "arguments", "started_at", "ended_at")
    return {name: getattr(session, name) for name in names}


def record_rows(
    kernel: KernelRow, trial: TrialRow, measured: MeasurementRow | None
) -> Iterator[tuple[Callable[[Row], object], Row]]:
    """What a record writes, with the parsers that must be able to read it."""
    yield kernel_from, {**kernel_identity(kernel), **knob_columns(kernel.candidate), **kernel_outcome(kernel)}
    yield trial_from, trial_values(trial)
    if measured:
        yield measurement_from, measurement_values(measured)


def require_readable(parse: Callable[[Row], object], row: Row) -> None:
    """Refuse to write a row that its parser would refuse to read."""
    try:
        parse({**row, "id": "to be written"})
    except InvalidPackError as error:
        raise DatabaseError(f"{error}; nothing was saved, correct the record") from None


def _notes_text(notes: tuple[str, ...]) -> str:
    return json.dumps([clean_text(note, MAX_NAME) for note in notes[:MAX_NOTES]])


def put_device(connection: sqlite3.Connection, device: DeviceSpec) -> int:
    """Find or add a device by its fingerprint; the name that came first stays."""
    return _find_or_add(connection, "devices", {"fingerprint": device.fingerprint}, device_values(device))


def put_toolchain(connection: sqlite3.Connection, toolchain: Toolchain) -> int:
    """Find or add a toolchain, whatever its torch."""
    values = toolchain_values(toolchain)
    return _find_or_add(connection, "toolchains", {"key": values["key"]}, values)


def put_problem(connection: sqlite3.Connection, problem: AttentionProblem) -> int:
    """Find or add a problem by its key."""
    return _find_or_add(connection, "problems", {"key": problem.key}, problem_values(problem))


def put_session(connection: sqlite3.Connection, session: SessionRow, *, device_id: int, toolchain_id: int) -> int:
    """Find or add another database's session by its uid. Its process is none of ours, so it is not running here."""
    values = session_values(session)
    if session.state is SessionState.RUNNING:
        values["state"] = SessionState.INTERRUPTED.value
    parents: Values = {"device_id": device_id, "toolchain_id": toolchain_id}
    session_id = _find_or_add(connection, "sessions", {"uid": session.uid}, {**values, **parents})
    if values["ended_at"] is not None:  # it may have ended since it was last brought here
        ended: Values = {"state": values["state"], "ended_at": values["ended_at"]}
        update(connection, "sessions", session_id, ended, unless="ended_at IS NOT NULL")
    return session_id


def put_kernel(
    connection: sqlite3.Connection, kernel: KernelRow, *, toolchain_id: int, overwrite: bool
) -> tuple[int, bool]:
    """Find or add a kernel; true if anything was changed.

    What the compiler said is written over only if asked, and never by one that did not run.

    Unless it is to `overwrite`, a kernel is also found by a digest that it had before `renew_kernel`, here or there.
    """
    before = connection.total_changes
    identity: Values = {**kernel_identity(kernel), "toolchain_id": toolchain_id}
    outcome = kernel_outcome(kernel)
    measured_as: Values = {"measured_as": outcome.pop("measured_as")}
    code: Values = {"code_digest": outcome.pop("code_digest")}
    if overwrite:
        row = _find(connection, "kernels", identity, also="id")
        kernel_id = None if row is None else int(row["id"])
    else:
        kernel_id = _find_renewed(connection, identity, kernel.measured_as)
    if kernel_id is None:
        values: Values = {**identity, **outcome, **code, **measured_as, **knob_columns(kernel.candidate)}
        return add(connection, "kernels", values), True
    if kernel.resources is not None:
        update(connection, "kernels", kernel_id, outcome, unless="0" if overwrite else "spill_bytes IS NOT NULL")
        if code["code_digest"] is not None:
            update(connection, "kernels", kernel_id, code, unless="0" if overwrite else "code_digest IS NOT NULL")
    elif outcome["compile_status"] != "not_compiled":
        status: Values = {"compile_status": outcome["compile_status"]}
        update(
            connection, "kernels", kernel_id, status, unless="0" if overwrite else "compile_status <> 'not_compiled'"
        )
    return kernel_id, connection.total_changes > before


def _find_renewed(connection: sqlite3.Connection, identity: Values, measured_as: str | None) -> int | None:
    """Find a kernel, also by a digest of it before it was renewed here; one that was renewed there becomes so here."""
    others = " AND ".join(f"{name} = :{name}" for name in identity if name != "digest")
    row = connection.execute(
        f"""SELECT id, ifnull(digest, '') = ifnull(:digest, '') AS is_same,
                   ifnull(measured_as = :digest, 0) AS is_newer, ifnull(digest = :measured_as, 0) AS is_older
            FROM kernels
            WHERE {others} AND (is_same OR is_newer OR is_older OR measured_as = :measured_as)
            ORDER BY is_newer DESC, is_same DESC, is_older DESC, id LIMIT 1""",
        {**identity, "measured_as": measured_as},
    ).fetchone()
    if row is None:
        return None
    if row["is_older"] and not row["is_same"] and not row["is_newer"]:
        renew_kernel(connection, int(row["id"]), str(identity["digest"]))
    return int(row["id"])


def renew_kernel(connection: sqlite3.Connection, kernel_id: int, digest: str) -> bool:
    """Give a kernel another digest; true if anything was changed.

    If there is a kernel of that digest already, it gets the trials instead. Where both were tried on a problem and
    ended well the measurements become one trial's; else a trial stays as it is, with its kernel.
    """
    values: Values = {"kernel_id": kernel_id, "digest": digest}
    other = connection.execute(
        """SELECT other.id FROM kernels AS other JOIN kernels AS this
           USING (config, family, variant, arch, form, toolchain_id)
           WHERE this.id = :kernel_id AND other.digest = :digest AND this.digest <> :digest""",
        values,
    ).fetchone()
    if other is None:
        statement = """UPDATE kernels SET measured_as = nullif(ifnull(measured_as, digest), :digest), digest = :digest
                       WHERE id = :kernel_id AND digest <> :digest"""
        return connection.execute(statement, values).rowcount == 1
    values["other_id"] = int(other["id"])
    pairs = connection.execute(
        """SELECT this.id AS this_id, other.id AS other_id FROM trials AS this JOIN trials AS other
           USING (problem_id, device_id)
           WHERE this.kernel_id = :kernel_id AND other.kernel_id = :other_id
           AND this.status = 'ok' AND other.status = 'ok'""",
        values,
    ).fetchall()
    for pair in pairs:
        # A measurement that both have, from a pack that was imported twice, goes with the trial.
        connection.execute("UPDATE OR IGNORE measurements SET trial_id = ? WHERE trial_id = ?", pair[::-1])
        connection.execute("DELETE FROM trials WHERE id = ?", pair[:1])
    statement = "UPDATE OR IGNORE trials SET kernel_id = :other_id WHERE kernel_id = :kernel_id"
    moved = connection.execute(statement, values).rowcount
    if not pairs and not moved:
        return False
    connection.execute(
        """UPDATE kernels SET measured_as = ifnull(measured_as, (
               SELECT ifnull(this.measured_as, this.digest) FROM kernels AS this WHERE this.id = :kernel_id))
           WHERE id = :other_id""",
        values,
    )
    connection.execute(
        """DELETE FROM kernels WHERE id = :kernel_id AND id NOT IN (SELECT kernel_id FROM trials)
           AND id NOT IN (SELECT kernel_id FROM portfolios)""",
        values,
    )
    return True


def forget_older_text(connection: sqlite3.Connection, kernel_id: int, trial_id: int) -> None:
    """Note that a kernel was measured as what it is, where no other trial of it was measured before."""
    connection.execute(
        """UPDATE kernels SET measured_as = NULL
           WHERE id = :kernel_id AND NOT EXISTS (
               SELECT 1 FROM trials WHERE kernel_id = :kernel_id AND id <> :trial_id)""",
        {"kernel_id": kernel_id, "trial_id": trial_id},
    )


def put_trial(connection: sqlite3.Connection, trial: TrialRow, *, keys: Values, overwrite: bool) -> tuple[int, bool]:
    """Find or add a trial by its kernel, problem and device (`keys`, with its session); true if it was changed.

    A later trial replaces an earlier one; `overwrite` does so whatever the clocks say.
    """
    identity = {name: keys[name] for name in ("kernel_id", "problem_id", "device_id")}
    values = {**keys, **trial_values(trial)}
    row = _find(connection, "trials", identity, also="ended_at")
    if row is None:
        return add(connection, "trials", values), True
    is_newer = overwrite or trial.ended_at > row["ended_at"]
    if is_newer:
        update(connection, "trials", row["id"], values)
    return int(row["id"]), is_newer


def put_measurement(
    connection: sqlite3.Connection, row: MeasurementRow, *, trial_id: int, session_id: int, overwrite: bool
) -> bool:
    """Add a measurement, or replace the one of the same trial, session and role by a later one; true if it changed."""
    identity: Values = {"trial_id": trial_id, "session_id": session_id, "role": row.measurement.role.value}
    values = {**identity, **measurement_values(row)}
    found = _find(connection, "measurements", identity, also="measured_at")
    if found is None:
        add(connection, "measurements", values)
    elif overwrite or row.measured_at > found["measured_at"]:
        update(connection, "measurements", found["id"], values)
    else:
        return False
    return True


def drop_rejection(connection: sqlite3.Connection, keys: Values) -> None:
    """Forget that a candidate was rejected before it was rendered, once it is rendered and tried."""
    connection.execute(
        """DELETE FROM trials
           WHERE status = 'rejected' AND problem_id = :problem_id AND device_id = :device_id AND kernel_id IN (
               SELECT unrendered.id FROM kernels AS unrendered JOIN kernels AS tried
               USING (config, family, variant, arch, form, toolchain_id)
               WHERE tried.id = :kernel_id AND tried.digest IS NOT NULL AND unrendered.digest IS NULL)""",
        keys,
    )


def update(connection: sqlite3.Connection, table: str, row_id: int, values: Values, unless: str = "0") -> None:
    """Write values over a row's, unless a condition on the row holds."""
    assignments = ", ".join(f"{name} = :{name}" for name in values)
    statement = f"UPDATE {table} SET {assignments} WHERE id = :row_id AND NOT ({unless})"
    connection.execute(statement, {**values, "row_id": row_id})


def _find_or_add(connection: sqlite3.Connection, table: str, identity: Values, values: Values) -> int:
    row = _find(connection, table, identity, also="id")
    return add(connection, table, values) if row is None else int(row["id"])


def _find(connection: sqlite3.Connection, table: str, identity: Values, *, also: str) -> Any:
    # `ifnull(digest, '')` is what the kernels' unique index holds: no digest equals no digest.
    terms = (
        f"ifnull({name}, '') = ifnull(:{name}, '')" if name == "digest" else f"{name} = :{name}" for name in identity
    )
    return connection.execute(f"SELECT id, {also} FROM {table} WHERE {' AND '.join(terms)}", identity).fetchone()


def add(connection: sqlite3.Connection, table: str, values: Values) -> int:
    """Insert a row and return its id."""
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    cursor = connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)
    return int(cursor.lastrowid or 0)
