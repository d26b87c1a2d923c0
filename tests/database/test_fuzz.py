"""Random damage and malice: whatever a database file holds, calls and commands go on, and say what they left out."""

import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.database import Miss, SessionKind, TuningDatabase
from fa_autotune.database.rows import COLUMNS
from fa_autotune.dispatch.decision import decide
from fa_autotune.dispatch.winners import Snapshot, load_snapshot
from fa_autotune.errors import FaAutotuneError
from fa_autotune.kernels.render import rendered_digest
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from kit.command import run
from kit.database_files import edit
from kit.hostile_files import HOSTILE
from kit.tuning_samples import H200, PROBLEM, begin, candidate, confirmed, fill, ok_record

MUTATIONS = 2000
SHARE = 100  # of them in one test
MAX_S = 5.0  # for a call or command
TRITON = "3.7.1"
PROBLEMS = [
    PROBLEM,
    *map(AttentionProblem.parse, ("4x32x8x2048x2048x128,causal", "1x8x8x512x512x64", "2x4x4x777x777x72")),
]
ABSENT = Path("/nonexistent/tuning.db")
HOSTILE_VALUES = (
    *("NULL", "0", "-1", "1", "2", "9e999", "-9e999", "1e300", "5e-324", "0.5", "9223372036854775807", "''", "' '"),
    *("'../x'", "'{{ 7 * 7 }}'", "'[]'", "'{}'", "'{\"a\":NaN}'", "char(27)", "char(0)", "char(8238)", "x'ff00fe'"),
    *("CAST(x'ff80' AS TEXT)", "hex(zeroblob(3000))", "hex(zeroblob(600000))", "'9999-12-31T23:59:59.999999Z'"),
    *("'2026-01-01T00:00:00.000000Z'", "replace(hex(zeroblob(2000)), '00', '[')", "'ok'", "'crashed'", "'confirm'"),
    *("{column} || ' '", "upper({column})", "-{column}", "{column} + 1", "{column} * 1.5", "substr({column}, 2)"),
    *(
        "replace({column}, '64', '32')",
        "replace({column}, '1', char(1633))",
        "CAST({column} AS TEXT)",
        "zeroblob(900000)",
    ),
)
HOSTILE_SCHEMA = (
    "CREATE TRIGGER t{n} AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
    "CREATE TRIGGER t{n} BEFORE UPDATE ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END",
    "CREATE INDEX i{n} ON {table} (hex(zeroblob(99)) || {column})",
    "CREATE INDEX i{n} ON {table} ({column}) WHERE {column} LIKE '%a%'",
    "ALTER TABLE {table} ADD COLUMN x{n} AS (hex(randomblob(9)))",
    "ALTER TABLE {table} RENAME COLUMN {column} TO y{n}",
    "ALTER TABLE {table} DROP COLUMN {column}",
    "DELETE FROM {table}",
    "INSERT INTO {table} SELECT * FROM {table} WHERE 0",
    "UPDATE {table} SET id = id + 1000",
    "DROP TABLE {table}",
    "CREATE TABLE z{n} (a CHECK (a LIKE '%a%'))",
    "PRAGMA user_version = {n}",
    "PRAGMA application_id = {n}",
    "CREATE VIRTUAL TABLE v{n} USING fts4(a)",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 20000) "
    "INSERT OR IGNORE INTO toolchains SELECT i + 9, i, hex(zeroblob(50)), NULL, NULL FROM n",
)


def flip_bytes(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 2, 5, 40))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)


def flip_bytes_of_rows(path: Path, draw: random.Random) -> None:
    """Where text of ours stands: there a changed byte is most often still a database."""
    content = bytearray(path.read_bytes())
    words = [b"sm_90", b"seqlen", b"BLOCK", b"2026", b"confirm", b"ok", b"portable", b"aligned", b"events", b"finished"]
    places = [place for word in words for place in find_all(content, word)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.choice(places) + draw.randrange(-40, 40)
        content[min(max(place, 0), len(content) - 1)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def find_all(content: bytearray, word: bytes) -> list[int]:
    places, start = [], content.find(word)
    while start >= 0:
        places.append(start)
        start = content.find(word, start + 1)
    return places


def cut_or_move_pages(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    pages = [content[start : start + 4096] for start in range(0, len(content), 4096)]
    one, other = draw.randrange(len(pages)), draw.randrange(len(pages))
    match draw.randrange(4):
        case 0:
            content = content[: draw.randrange(len(content))]
        case 1:
            pages[one], pages[other] = pages[other], pages[one]
            content = b"".join(pages)
        case 2:
            pages[one] = bytes(len(pages[one]))
            content = b"".join(pages)
        case _:
            pages[one] = pages[other]
            content = b"".join(pages) + draw.randbytes(draw.randrange(5000))
    path.write_bytes(content)


def hostile_value(path: Path, draw: random.Random) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("ignore_check_constraints = ON", "foreign_keys = OFF", "synchronous = OFF"):
            connection.execute(f"PRAGMA {pragma}")
        if draw.random() < 0.5:
            connection.execute("PRAGMA writable_schema = ON")
            loose = "UPDATE sqlite_master SET sql = replace(replace(sql, 'STRICT', ''), 'NOT NULL', '')"
            connection.execute(f"{loose} WHERE type = 'table'")
            version = connection.execute("PRAGMA schema_version").fetchone()[0]
            connection.execute(f"PRAGMA schema_version = {version + 1}")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for _ in range(draw.choice((1, 1, 2, 3))):
            table = draw.choice(list(COLUMNS))
            column = draw.choice(COLUMNS[table])
            value = draw.choice(HOSTILE_VALUES).replace("{column}", column)
            if column == "rank" and value in "12":  # as good an order of finalists as any
                continue
            where = draw.choice(("", "WHERE id = (SELECT min(id) FROM {0})", "WHERE id = (SELECT max(id) FROM {0})"))
            with suppress(sqlite3.Error):
                connection.execute(f"UPDATE {table} SET {column} = {value} {where.format(table)}")


def hostile_schema(path: Path, draw: random.Random) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA foreign_keys = OFF")
        if draw.random() < 0.5:
            for view in ("winners", "leaderboard", "rejections"):
                connection.execute(f"DROP VIEW {view}")
        for number in range(draw.choice((1, 2, 4))):
            table = draw.choice(list(COLUMNS))
            statement = draw.choice(HOSTILE_SCHEMA)
            with suppress(sqlite3.Error):
                connection.execute(statement.format(n=number, table=table, column=draw.choice(COLUMNS[table])))


def known_malice(path: Path, draw: random.Random) -> None:
    with suppress(sqlite3.Error):
        HOSTILE[draw.choice(list(HOSTILE))](path)


def damaged_log(path: Path, draw: random.Random) -> None:
    """A log of changes that nobody took in, cut or changed anywhere."""
    edit(path, "PRAGMA journal_mode = wal")
    with TuningDatabase(path) as database:
        session = begin(database, SessionKind.CONFIRM)
        database.save_trial(session, confirmed(0.4, 1, 32, digest=rendered_digest(candidate(32))))
        live = {suffix: path.with_name(path.name + suffix).read_bytes() for suffix in ("", "-wal", "-shm")}
    for suffix, content in live.items():
        changed = bytearray(content)
        if suffix != "" and draw.random() < 0.8:
            for _ in range(draw.choice((1, 3, 30))):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        if suffix == "-wal" and draw.random() < 0.6:
            changed = changed[: draw.randrange(len(changed))]
        path.with_name(path.name + suffix).write_bytes(changed)


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bytes,
    flip_bytes_of_rows,
    cut_or_move_pages,
    hostile_value,
    hostile_value,
    hostile_schema,
    known_malice,
    damaged_log,
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with winners of several problems and variants, whose kernels are those of today's templates."""
    path = tmp_path_factory.mktemp("valid") / "valid.db"
    with TuningDatabase(":memory:") as database:
        fill(database)
        session = begin(database, SessionKind.CONFIRM)
        for problem in PROBLEMS:
            for variant, block_m, rank in ((Variant.PORTABLE, 64, 1), (Variant.TMA, 64, 1), (Variant.TMA, 128, 2)):
                digest = rendered_digest(candidate(block_m, problem=problem, variant=variant))
                record = confirmed(1.0 + rank, rank, block_m, problem=problem, variant=variant, digest=digest)
                database.save_trial(session, record)
        database.save_trial(session, ok_record(3.0, 32, digest=rendered_digest(candidate(32))))
        database.add_misses([Miss(problem=PROBLEM, device_fingerprint=H200.fingerprint)])
        database.export(path, winners_only=False)
    return path


def decided(snapshot: Snapshot) -> list[Candidate]:
    """What each problem runs."""
    known: dict[str, Any] = {
        "device": H200,
        "triton_version": TRITON,
        "snapshot": snapshot,
        "digest_of": rendered_digest,
    }
    return [decide(problem, **known).candidate for problem in PROBLEMS]


def is_stale_somewhere(problem: AttentionProblem, snapshot: Snapshot) -> bool:
    """True if a winner of a problem is not of today's templates or Triton, which a decision then says."""
    return any(
        row.kernel_digest != rendered_digest(row.candidate) or row.triton != TRITON
        for row in snapshot.rows
        if row.problem == problem
    )


def timed(action: Callable[[], object]) -> object:
    start = time.monotonic()
    try:
        found = action()
    except FaAutotuneError as error:
        found = error
    assert time.monotonic() - start < MAX_S
    assert not isinstance(found, FaAutotuneError) or str(found).replace("\n", " ").isprintable()
    return found


@pytest.mark.parametrize(
    "share",
    [pytest.param(share, marks=pytest.mark.slow if share else pytest.mark.rest) for share in range(MUTATIONS // SHARE)],
)
def test_no_damage_and_no_malice_breaks_a_call_or_changes_a_winner_in_silence(
    share: int, valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decided(load_snapshot(ABSENT, [valid]))
    assert len(set(expected)) > 1
    for number in range(share * SHARE, (share + 1) * SHARE):
        draw = random.Random(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "t.db"
        shutil.copy(valid, path)
        kind = draw.choice(KINDS)
        kind(path, draw)
        told = f"mutation {number}: {kind.__name__}"
        for snapshot in (timed(partial(load_snapshot, path, [])), timed(partial(load_snapshot, ABSENT, [path]))):
            assert isinstance(snapshot, Snapshot), told
            assert all(note.isprintable() for note in snapshot.notes), told
            if kind is not damaged_log and not snapshot.notes:
                now = decided(snapshot)
                changed = [
                    problem
                    for problem, old, new in zip(PROBLEMS, expected, now, strict=True)
                    if old != new and not is_stale_somewhere(problem, snapshot)
                ]
                assert changed == [], told
        use(path, folder)
        monkeypatch.setenv("FA_AUTOTUNE_DB", str(path))
        for words in (
            ["db", "info"],
            ["db", "winners"],
            ["db", "trials", "--json"],
            ["db", "top", "--problem", PROBLEM.label],
        ):
            done = run(*words)
            assert done.exception is None or isinstance(done.exception, SystemExit), told
            assert done.exit_code in (0, 2), told
        shutil.rmtree(folder)


def use(path: Path, folder: Path) -> None:
    """What else is done with a file: it is read, imported, exported, and written."""

    def read() -> None:
        with TuningDatabase(path, read_only=True) as database:
            for verb in (database.winners, database.trials, database.misses, database.info, database.rejections):
                timed(verb)
            timed(lambda: database.leaderboard(PROBLEM))
            timed(lambda: database.export(folder / "out.db"))
            timed(lambda: database.export_json(winners_only=False))

    def take_in() -> None:
        with TuningDatabase(":memory:") as database:
            database.import_pack(path)

    def write() -> None:
        with TuningDatabase(path) as database:
            session = begin(database)
            database.claim(session, PROBLEM)
            database.save_trial(session, ok_record(0.5, 16))

    for action in (read, take_in, write):
        timed(action)
