"""The schema: numbered migrations (never edited once released), and the views, which are made anew after each.

A migration holds literal SQL. The words that a CHECK allows are those of our enums when it was written; a test
compares them with today's. A new word, table or column is a new migration, and SCHEMA_VERSION its number: then older
releases refuse the file instead of misreading it. A word in a CHECK needs its table rebuilt (`transform`).

No CHECK and no generated column calls a JSON function: SQLite before 3.41 holds those unsafe, and a file with one does
not open at all under `trusted_schema = OFF`, which is how packs are read. Knobs are flattened into plain columns.
"""

from sqlite_utils import Database, Migrations

from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.errors import DatabaseError

migrations = Migrations("fa_autotune")

# Rank 1 of the newest session that confirmed a (device, problem, variant, release of Triton). A trial that has failed
# since is none.
_MINOR = "CAST(substr(triton, instr(triton, '.') + 1) AS INTEGER)"  # the digits that it begins with
_RELEASE = f"""CASE WHEN triton GLOB CAST(triton AS INTEGER) || '.[0-9]*'
           THEN CAST(triton AS INTEGER) || '.' || {_MINOR} ELSE triton END"""
WINNERS_SQL = f"""
SELECT device_fingerprint, device_arch, device_name, problem_key, variant, config, kernel_digest, measured_as, form,
       triton_release, triton, cuda, driver, torch, regime, median_ms, p20_ms, p80_ms,
       registers, spill_bytes, smem_bytes, max_error_ratio, confirmed_at, session_id, trial_id
FROM (
    SELECT devices.fingerprint AS device_fingerprint, devices.arch AS device_arch, devices.name AS device_name,
           problems.key AS problem_key, kernels.variant, kernels.config, kernels.digest AS kernel_digest,
           kernels.measured_as, kernels.form, {_RELEASE} AS triton_release,
           toolchains.triton, toolchains.cuda, toolchains.driver, sessions.torch,
           measurements.regime, measurements.median_ms, measurements.p20_ms, measurements.p80_ms,
           kernels.registers, kernels.spill_bytes, kernels.smem_bytes, trials.max_error_ratio,
           measurements.measured_at AS confirmed_at, measurements.session_id, trials.id AS trial_id,
           row_number() OVER (
               PARTITION BY trials.device_id, trials.problem_id, kernels.variant, {_RELEASE}
               ORDER BY sessions.started_at DESC, sessions.uid DESC, measurements.measured_at DESC, measurements.id DESC
           ) AS recency
    FROM measurements
    JOIN sessions ON sessions.id = measurements.session_id
    JOIN trials ON trials.id = measurements.trial_id
    JOIN kernels ON kernels.id = trials.kernel_id
    JOIN problems ON problems.id = trials.problem_id
    JOIN devices ON devices.id = trials.device_id
    JOIN toolchains ON toolchains.id = kernels.toolchain_id
    WHERE measurements.role = 'confirm' AND measurements.rank = 1 AND trials.status = 'ok'
)
WHERE recency = 1
ORDER BY device_fingerprint, problem_key, variant, triton_release
"""

LEADERBOARD_SQL = """
SELECT row_number() OVER (
           PARTITION BY trials.device_id, trials.problem_id, measurements.regime
           ORDER BY measurements.early_stopped, measurements.median_ms, trials.id
       ) AS position,
       devices.fingerprint AS device_fingerprint, devices.name AS device_name, problems.key AS problem_key,
       kernels.variant, kernels.config, kernels.digest AS kernel_digest, kernels.form, toolchains.triton,
       measurements.role, measurements.regime, measurements.early_stopped,
       measurements.median_ms, measurements.p20_ms, measurements.p80_ms,
       kernels.registers, kernels.spill_bytes, kernels.smem_bytes, kernels.compile_s,
       trials.max_error_ratio, measurements.measured_at, trials.id AS trial_id
FROM trials
JOIN measurements ON measurements.id = (
    SELECT newest.id FROM measurements AS newest WHERE newest.trial_id = trials.id
    ORDER BY newest.role = 'confirm' DESC, newest.measured_at DESC, newest.id DESC LIMIT 1
)
JOIN kernels ON kernels.id = trials.kernel_id
JOIN problems ON problems.id = trials.problem_id
JOIN devices ON devices.id = trials.device_id
JOIN toolchains ON toolchains.id = kernels.toolchain_id
WHERE trials.status = 'ok'
ORDER BY device_fingerprint, problem_key, measurements.regime, position
"""

REJECTIONS_SQL = """
SELECT devices.fingerprint AS device_fingerprint, problems.key AS problem_key, kernels.variant, trials.status,
       trials.constraint_name, count(*) AS trials
FROM trials
JOIN kernels ON kernels.id = trials.kernel_id
JOIN problems ON problems.id = trials.problem_id
JOIN devices ON devices.id = trials.device_id
WHERE trials.status <> 'ok'
GROUP BY devices.fingerprint, problems.key, kernels.variant, trials.status, trials.constraint_name
ORDER BY devices.fingerprint, problems.key, kernels.variant, count(*) DESC, trials.status, trials.constraint_name
"""

VIEWS = {"winners": WINNERS_SQL, "leaderboard": LEADERBOARD_SQL, "rejections": REJECTIONS_SQL}

_M001 = (
    """CREATE TABLE devices (
        id INTEGER PRIMARY KEY,
        fingerprint TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        arch TEXT NOT NULL,
        num_sms INTEGER NOT NULL,
        smem_optin_bytes INTEGER NOT NULL,
        smem_per_sm_bytes INTEGER NOT NULL,
        l2_bytes INTEGER NOT NULL,
        memory_gb INTEGER NOT NULL,
        regs_per_sm INTEGER NOT NULL,
        max_threads_per_sm INTEGER NOT NULL,
        warp_size INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE toolchains (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        triton TEXT NOT NULL,
        cuda TEXT,
        driver TEXT
    ) STRICT""",
    """CREATE TABLE problems (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        kernel_pass TEXT NOT NULL,
        dtype TEXT NOT NULL,
        head_dim INTEGER NOT NULL,
        head_dim_v INTEGER NOT NULL,
        bounded_right INTEGER NOT NULL CHECK (bounded_right IN (0, 1)),
        access TEXT NOT NULL,
        batch_size INTEGER NOT NULL,
        num_q_heads INTEGER NOT NULL,
        num_kv_heads INTEGER NOT NULL,
        seqlen_q INTEGER NOT NULL,
        seqlen_k INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE sessions (
        id INTEGER PRIMARY KEY,
        uid TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL CHECK (kind IN ('tune', 'confirm', 'recheck')),
        state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'interrupted', 'failed')),
        device_id INTEGER NOT NULL REFERENCES devices (id),
        toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
        parent_id INTEGER REFERENCES sessions (id),
        torch TEXT,
        power_limit_w REAL,
        arguments TEXT NOT NULL,
        host TEXT,
        pid INTEGER,
        process_start TEXT,
        started_at TEXT NOT NULL,
        ended_at TEXT
    ) STRICT""",
    """CREATE TABLE kernels (
        id INTEGER PRIMARY KEY,
        digest TEXT,
        arch TEXT NOT NULL,
        form TEXT NOT NULL CHECK (form IN ('aligned', 'general')),
        toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
        kernel_pass TEXT NOT NULL,
        variant TEXT NOT NULL,
        family TEXT NOT NULL,
        config TEXT NOT NULL,
        block_m INTEGER,
        block_n INTEGER,
        num_warps INTEGER,
        num_stages INTEGER,
        maxnreg INTEGER,
        compile_status TEXT NOT NULL CHECK (compile_status IN ('not_compiled', 'compiled', 'failed')),
        registers INTEGER,
        spill_bytes INTEGER CHECK (spill_bytes >= 0),
        smem_bytes INTEGER CHECK (smem_bytes >= 0),
        compile_s REAL CHECK (compile_s >= 0 AND compile_s < 1e9),
        compile_warnings TEXT
    ) STRICT""",
    """CREATE TABLE trials (
        id INTEGER PRIMARY KEY,
        kernel_id INTEGER NOT NULL REFERENCES kernels (id),
        problem_id INTEGER NOT NULL REFERENCES problems (id),
        device_id INTEGER NOT NULL REFERENCES devices (id),
        session_id INTEGER NOT NULL REFERENCES sessions (id),
        status TEXT NOT NULL CHECK (status IN ('ok', 'rejected', 'compile_failed', 'over_resources', 'wrong_result',
                                               'launch_failed', 'timed_out', 'crashed', 'out_of_memory')),
        constraint_name TEXT,
        error TEXT,
        max_error REAL,
        max_error_ratio REAL,
        mean_error_ratio REAL,
        lse_error REAL,
        probes INTEGER CHECK (probes >= 0),
        accuracy_failures TEXT,
        duration_s REAL NOT NULL CHECK (duration_s >= 0 AND duration_s < 1e9),
        ended_at TEXT NOT NULL,
        UNIQUE (kernel_id, problem_id, device_id)
    ) STRICT""",
    """CREATE TABLE measurements (
        id INTEGER PRIMARY KEY,
        trial_id INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
        session_id INTEGER NOT NULL REFERENCES sessions (id),
        role TEXT NOT NULL CHECK (role IN ('screen', 'confirm')),
        regime TEXT NOT NULL CHECK (regime IN ('events', 'graph', 'wall')),
        launches INTEGER NOT NULL CHECK (launches >= 1),
        p20_ms REAL NOT NULL CHECK (p20_ms > 0 AND p20_ms < 1e9),
        median_ms REAL NOT NULL CHECK (median_ms > 0 AND median_ms < 1e9),
        p80_ms REAL NOT NULL CHECK (p80_ms > 0 AND p80_ms < 1e9),
        early_stopped INTEGER NOT NULL CHECK (early_stopped IN (0, 1)),
        rank INTEGER CHECK (rank >= 1),
        sm_clock_mhz INTEGER,
        power_w REAL,
        temperature_c INTEGER,
        measured_at TEXT NOT NULL,
        UNIQUE (trial_id, session_id, role)
    ) STRICT""",
    """CREATE TABLE portfolios (
        id INTEGER PRIMARY KEY,
        device_id INTEGER NOT NULL REFERENCES devices (id),
        kernel_id INTEGER NOT NULL REFERENCES kernels (id),
        family TEXT NOT NULL,
        variant TEXT NOT NULL,
        position INTEGER NOT NULL CHECK (position >= 1),
        created_at TEXT NOT NULL,
        UNIQUE (device_id, family, variant, position)
    ) STRICT""",
    """CREATE TABLE misses (
        id INTEGER PRIMARY KEY,
        problem_id INTEGER NOT NULL REFERENCES problems (id),
        device_fingerprint TEXT NOT NULL,
        count INTEGER NOT NULL CHECK (count >= 1),
        last_seen TEXT NOT NULL,
        UNIQUE (problem_id, device_fingerprint)
    ) STRICT""",
    # A template that changes gives a config another digest, hence another kernel; one that was never rendered has none.
    """CREATE UNIQUE INDEX idx_kernels_identity
        ON kernels (config, family, variant, arch, form, toolchain_id, ifnull(digest, ''))""",
    "CREATE INDEX idx_kernels_digest ON kernels (digest)",
    "CREATE INDEX idx_kernels_toolchain_id ON kernels (toolchain_id)",
    "CREATE INDEX idx_problems_family ON problems (kernel_pass, dtype, head_dim, head_dim_v, bounded_right, access)",
    "CREATE INDEX idx_sessions_device_id ON sessions (device_id)",
    "CREATE INDEX idx_sessions_toolchain_id ON sessions (toolchain_id)",
    "CREATE INDEX idx_sessions_parent_id ON sessions (parent_id)",
    "CREATE INDEX idx_trials_problem_id ON trials (problem_id, device_id, status)",
    "CREATE INDEX idx_trials_device_id ON trials (device_id)",
    "CREATE INDEX idx_trials_session_id ON trials (session_id)",
    "CREATE INDEX idx_measurements_session_id ON measurements (session_id)",
    "CREATE INDEX idx_measurements_winners ON measurements (session_id, trial_id) WHERE role = 'confirm' AND rank = 1",
    "CREATE INDEX idx_portfolios_kernel_id ON portfolios (kernel_id)",
)


@migrations()
def m001_initial(db: Database) -> None:
    """The tables of the first release."""
    for statement in _M001:
        db.execute(statement)


_M002 = (
    """CREATE TABLE claims (
        id INTEGER PRIMARY KEY,
        problem_id INTEGER NOT NULL REFERENCES problems (id),
        device_id INTEGER NOT NULL REFERENCES devices (id),
        toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
        session_id INTEGER NOT NULL REFERENCES sessions (id),
        claimed_at TEXT NOT NULL,
        UNIQUE (problem_id, device_id, toolchain_id)
    ) STRICT""",
    "CREATE INDEX idx_claims_device_id ON claims (device_id)",
    "CREATE INDEX idx_claims_toolchain_id ON claims (toolchain_id)",
    "CREATE INDEX idx_claims_session_id ON claims (session_id)",
)


@migrations()
def m002_claims(db: Database) -> None:
    """Which running session works on which problem."""
    for statement in _M002:
        db.execute(statement)


_M003 = (
    "ALTER TABLE kernels ADD COLUMN code_digest TEXT",
    "ALTER TABLE kernels ADD COLUMN measured_as TEXT",
)


@migrations()
def m003_machine_code(db: Database) -> None:
    """What a kernel's machine code is, and which text of that code was measured."""
    for statement in _M003:
        db.execute(statement)


def migrate(db: Database) -> None:
    """Bring a database to SCHEMA_VERSION, all or nothing. The caller keeps other processes away."""
    db.execute("BEGIN IMMEDIATE")
    try:
        for view in VIEWS:  # before the tables change under them
            db.execute(f"DROP VIEW IF EXISTS {view}")
        migrations.apply(db)
        for view, select in VIEWS.items():
            db.execute(f"CREATE VIEW {view} AS {select.strip()}")
            db.execute(f"SELECT * FROM {view} LIMIT 1").fetchall()  # SQLite checks a view only when it is read
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        broken = db.execute("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise DatabaseError(
                f"{len(broken)} rows refer to rows that are gone, the first in {broken[0][0]}; keep a copy"
            )
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise
