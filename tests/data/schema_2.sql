PRAGMA application_id = 1717649748;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'fa_autotune','m001_initial','2026-11-30 00:11:42.193914+00:00');
INSERT INTO "_sqlite_migrations" VALUES(2,'fa_autotune','m002_claims','2026-11-30 00:11:42.194190+00:00');
CREATE TABLE claims (
        id INTEGER PRIMARY KEY,
        problem_id INTEGER NOT NULL REFERENCES problems (id),
        device_id INTEGER NOT NULL REFERENCES devices (id),
        toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
        session_id INTEGER NOT NULL REFERENCES sessions (id),
        claimed_at TEXT NOT NULL,
        UNIQUE (problem_id, device_id, toolchain_id)
    ) STRICT;
CREATE TABLE devices (
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
    ) STRICT;
INSERT INTO "devices" VALUES(1,'sm_90/132sm/227KB/60MB/141GB','NVIDIA H200','sm_90',132,232448,233472,62914560,141,65536,2048,32);
CREATE TABLE kernels (
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
    ) STRICT;
INSERT INTO "kernels" VALUES(1,'portable-0010','sm_90','aligned',1,'fwd','portable','{"access":"tma","bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,"pass":"fwd","schema":1}','{"BLOCK_M":16,"BLOCK_N":64,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,"HEAD_DIM_PIECE":256,"ROW_SUM_LANES":1,"maxnreg":null,"num_stages":2,"num_warps":4,"schema":1}',16,64,4,2,NULL,'compiled',168,0,98304,1.25,'["slow path"]');
INSERT INTO "kernels" VALUES(2,'portable-0020','sm_90','aligned',1,'fwd','portable','{"access":"tma","bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,"pass":"fwd","schema":1}','{"BLOCK_M":32,"BLOCK_N":64,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,"HEAD_DIM_PIECE":256,"ROW_SUM_LANES":1,"maxnreg":null,"num_stages":2,"num_warps":4,"schema":1}',32,64,4,2,NULL,'compiled',168,0,98304,1.25,'["slow path"]');
INSERT INTO "kernels" VALUES(3,'portable-0040','sm_90','aligned',1,'fwd','portable','{"access":"tma","bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,"pass":"fwd","schema":1}','{"BLOCK_M":64,"BLOCK_N":64,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,"HEAD_DIM_PIECE":256,"ROW_SUM_LANES":1,"maxnreg":null,"num_stages":2,"num_warps":4,"schema":1}',64,64,4,2,NULL,'compiled',168,0,98304,1.25,'["slow path"]');
INSERT INTO "kernels" VALUES(4,'portable-0080','sm_90','aligned',1,'fwd','portable','{"access":"tma","bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,"pass":"fwd","schema":1}','{"BLOCK_M":128,"BLOCK_N":64,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,"HEAD_DIM_PIECE":256,"ROW_SUM_LANES":1,"maxnreg":null,"num_stages":2,"num_warps":4,"schema":1}',128,64,4,2,NULL,'compiled',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "kernels" VALUES(5,NULL,'sm_90','aligned',1,'fwd','portable','{"access":"tma","bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,"pass":"fwd","schema":1}','{"BLOCK_M":256,"BLOCK_N":64,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,"HEAD_DIM_PIECE":256,"ROW_SUM_LANES":1,"maxnreg":null,"num_stages":2,"num_warps":4,"schema":1}',256,64,4,2,NULL,'not_compiled',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE measurements (
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
    ) STRICT;
INSERT INTO "measurements" VALUES(1,1,1,'screen','events',100,0.796875,1.0625,1.328125,0,NULL,1980,650.5,61,'2026-11-30T00:11:42.198066Z');
INSERT INTO "measurements" VALUES(2,2,1,'screen','events',100,0.7734375,1.03125,1.2890625,0,NULL,1980,650.5,61,'2026-11-30T00:11:42.199507Z');
INSERT INTO "measurements" VALUES(3,3,1,'screen','events',100,0.76171875,1.015625,1.26953125,0,NULL,1980,650.5,61,'2026-11-30T00:11:42.200474Z');
INSERT INTO "measurements" VALUES(4,3,2,'confirm','events',100,0.675,0.9,1.125,0,1,1980,650.5,61,'2026-11-30T00:11:42.203624Z');
INSERT INTO "measurements" VALUES(5,2,2,'confirm','events',100,7.12499999999999911182e-01,0.95,1.1875,0,2,1980,650.5,61,'2026-11-30T00:11:42.204586Z');
CREATE TABLE misses (
        id INTEGER PRIMARY KEY,
        problem_id INTEGER NOT NULL REFERENCES problems (id),
        device_fingerprint TEXT NOT NULL,
        count INTEGER NOT NULL CHECK (count >= 1),
        last_seen TEXT NOT NULL,
        UNIQUE (problem_id, device_fingerprint)
    ) STRICT;
INSERT INTO "misses" VALUES(1,1,'sm_90/132sm/227KB/60MB/141GB',2,'2026-11-30T00:11:42.442173Z');
CREATE TABLE portfolios (
        id INTEGER PRIMARY KEY,
        device_id INTEGER NOT NULL REFERENCES devices (id),
        kernel_id INTEGER NOT NULL REFERENCES kernels (id),
        family TEXT NOT NULL,
        variant TEXT NOT NULL,
        position INTEGER NOT NULL CHECK (position >= 1),
        created_at TEXT NOT NULL,
        UNIQUE (device_id, family, variant, position)
    ) STRICT;
CREATE TABLE problems (
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
    ) STRICT;
INSERT INTO "problems" VALUES(1,'{"access":"tma","batch_size":4,"bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,"num_kv_heads":8,"num_q_heads":32,"pass":"fwd","schema":1,"seqlen_k":4096,"seqlen_q":4096}','fwd','bfloat16',128,128,1,'tma',4,32,8,4096,4096);
CREATE TABLE sessions (
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
    ) STRICT;
INSERT INTO "sessions" VALUES(1,'8661ecabfb8a4be79f1a694c92e27aa3','tune','finished',1,1,NULL,'2.13.0',NULL,'{}',NULL,NULL,NULL,'2026-11-30T00:11:42.196630Z','2026-11-30T00:11:42.205858Z');
INSERT INTO "sessions" VALUES(2,'634851b5a64140f4ade3b9003bccdec9','confirm','finished',1,1,1,'2.13.0',NULL,'{}',NULL,NULL,NULL,'2026-11-30T00:11:42.202850Z','2026-11-30T00:11:42.205479Z');
CREATE TABLE toolchains (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        triton TEXT NOT NULL,
        cuda TEXT,
        driver TEXT
    ) STRICT;
INSERT INTO "toolchains" VALUES(1,'{"cuda":"12.8","driver":"570.86.15","triton":"3.7.1"}','3.7.1','12.8','570.86.15');
CREATE TABLE trials (
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
    ) STRICT;
INSERT INTO "trials" VALUES(1,1,1,1,1,'ok',NULL,NULL,0.002,0.5,0.25,1.0e-06,3,'[]',2.5,'2026-11-30T00:11:42.198066Z');
INSERT INTO "trials" VALUES(2,2,1,1,2,'ok',NULL,NULL,0.002,0.5,0.25,1.0e-06,3,'[]',2.5,'2026-11-30T00:11:42.204586Z');
INSERT INTO "trials" VALUES(3,3,1,1,2,'ok',NULL,NULL,0.002,0.5,0.25,1.0e-06,3,'[]',2.5,'2026-11-30T00:11:42.203624Z');
INSERT INTO "trials" VALUES(4,4,1,1,1,'wrong_result',NULL,'max error 3.0',NULL,NULL,NULL,NULL,NULL,NULL,0.0,'2026-11-30T00:11:42.201389Z');
INSERT INTO "trials" VALUES(5,5,1,1,1,'rejected','shared_memory','needs 300000 bytes',NULL,NULL,NULL,NULL,NULL,NULL,0.0,'2026-11-30T00:11:42.202189Z');
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE UNIQUE INDEX idx_kernels_identity
        ON kernels (config, family, variant, arch, form, toolchain_id, ifnull(digest, ''));
CREATE INDEX idx_kernels_digest ON kernels (digest);
CREATE INDEX idx_kernels_toolchain_id ON kernels (toolchain_id);
CREATE INDEX idx_problems_family ON problems (kernel_pass, dtype, head_dim, head_dim_v, bounded_right, access);
CREATE INDEX idx_sessions_device_id ON sessions (device_id);
CREATE INDEX idx_sessions_toolchain_id ON sessions (toolchain_id);
CREATE INDEX idx_sessions_parent_id ON sessions (parent_id);
CREATE INDEX idx_trials_problem_id ON trials (problem_id, device_id, status);
CREATE INDEX idx_trials_device_id ON trials (device_id);
CREATE INDEX idx_trials_session_id ON trials (session_id);
CREATE INDEX idx_measurements_session_id ON measurements (session_id);
CREATE INDEX idx_measurements_winners ON measurements (session_id, trial_id) WHERE role = 'confirm' AND rank = 1;
CREATE INDEX idx_portfolios_kernel_id ON portfolios (kernel_id);
CREATE INDEX idx_claims_device_id ON claims (device_id);
CREATE INDEX idx_claims_toolchain_id ON claims (toolchain_id);
CREATE INDEX idx_claims_session_id ON claims (session_id);
CREATE VIEW winners AS SELECT device_fingerprint, device_arch, device_name, problem_key, variant, config, kernel_digest, form,
       triton, cuda, driver, torch, regime, median_ms, p20_ms, p80_ms,
       registers, spill_bytes, smem_bytes, max_error_ratio, confirmed_at, session_id, trial_id
FROM (
    SELECT devices.fingerprint AS device_fingerprint, devices.arch AS device_arch, devices.name AS device_name,
           problems.key AS problem_key, kernels.variant, kernels.config, kernels.digest AS kernel_digest, kernels.form,
           toolchains.triton, toolchains.cuda, toolchains.driver, sessions.torch,
           measurements.regime, measurements.median_ms, measurements.p20_ms, measurements.p80_ms,
           kernels.registers, kernels.spill_bytes, kernels.smem_bytes, trials.max_error_ratio,
           measurements.measured_at AS confirmed_at, measurements.session_id, trials.id AS trial_id,
           row_number() OVER (
               PARTITION BY trials.device_id, trials.problem_id, kernels.variant
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
ORDER BY device_fingerprint, problem_key, variant;
CREATE VIEW leaderboard AS SELECT row_number() OVER (
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
ORDER BY device_fingerprint, problem_key, measurements.regime, position;
CREATE VIEW rejections AS SELECT devices.fingerprint AS device_fingerprint, problems.key AS problem_key, kernels.variant, trials.status,
       trials.constraint_name, count(*) AS trials
FROM trials
JOIN kernels ON kernels.id = trials.kernel_id
JOIN problems ON problems.id = trials.problem_id
JOIN devices ON devices.id = trials.device_id
WHERE trials.status <> 'ok'
GROUP BY devices.fingerprint, problems.key, kernels.variant, trials.status, trials.constraint_name
ORDER BY devices.fingerprint, problems.key, kernels.variant, count(*) DESC, trials.status, trials.constraint_name;
COMMIT;
