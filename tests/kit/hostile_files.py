"""What an attacker, or a damaged disk, may make of a good pack: each is a change of the file in place."""

from collections.abc import Callable
from pathlib import Path

from kit.database_files import edit


def rewrite_schema(table: str, old: str, new: str) -> Callable[[Path], None]:
    """Change a table's definition in place, as only an attacker would."""

    def change(path: Path) -> None:
        edit(
            path,
            "PRAGMA writable_schema = ON",
            f"UPDATE sqlite_master SET sql = replace(sql, '{old}', '{new}') WHERE name = '{table}'",
        )

    return change


def set_to(table: str, column: str, value: str) -> Callable[[Path], None]:
    return lambda path: edit(path, f"UPDATE {table} SET {column} = {value}")


def loosely(table: str, column: str, value: str) -> Callable[[Path], None]:
    """Set a value of the wrong type, in a table that is no longer strict."""

    def change(path: Path) -> None:
        rewrite_schema(table, "STRICT", "")(path)
        set_to(table, column, value)(path)

    return change


def replaced_by_view(path: Path) -> None:
    edit(
        path,
        *(f"DROP VIEW {view}" for view in ("winners", "leaderboard", "rejections")),
        "ALTER TABLE toolchains RENAME TO hidden",
        "CREATE VIEW toolchains AS SELECT * FROM hidden",
    )


HOSTILE: dict[str, Callable[[Path], None]] = {
    "config with another entry": set_to("kernels", "config", """replace(config, '"BLOCK_M"', '"A":1,"BLOCK_M"')"""),
    "config that is code": set_to("kernels", "config", "'{{ 7 * 7 }}'"),
    "config with text for a number": set_to("kernels", "config", """replace(config, ':64', ':"{{x}}"')"""),
    "config out of its domain": set_to("kernels", "config", "replace(config, ':64', ':4096')"),
    "config not in canonical form": set_to("kernels", "config", "config || ' '"),
    "config of another variant": set_to("kernels", "variant", "'tma'"),
    "config nested without end": set_to("kernels", "config", "replace(hex(zeroblob(1500)), '00', '[')"),
    "unknown variant": set_to("kernels", "variant", "'__import__'"),
    "digest that is a path": set_to("kernels", "digest", "'../' || digest"),
    "arch of another device": set_to("kernels", "arch", "'sm_80'"),
    "arch that is none": set_to("devices", "arch", "'sm_90; rm'"),
    "fingerprint of another device": set_to("devices", "fingerprint", "'sm_90/1sm/1KB/1MB/1GB'"),
    "name that steers a terminal": set_to("devices", "name", "char(27) || '[2J'"),
    "huge name": set_to("devices", "name", "hex(zeroblob(300000))"),
    "value past SQLite's limit": set_to("devices", "name", "hex(zeroblob(1000000))"),
    "text that is no UTF-8": set_to("devices", "name", "CAST(x'ff80' AS TEXT)"),
    "problem of unknown schema": set_to("problems", "key", """replace(key, '"schema":1', '"schema":9')"""),
    "problem with huge lengths": set_to("problems", "key", """replace(key, '4096', '99999999999999999999')"""),
    "problem of another family": set_to("problems", "key", "replace(key, 'bfloat16', 'float16')"),
    "unknown status": set_to("trials", "status", "'great'"),
    "status without measurement": lambda path: edit(path, "DELETE FROM measurements"),
    "arguments with NaN": set_to("sessions", "arguments", """'{"a": NaN}'"""),
    "arguments with infinity": set_to("sessions", "arguments", """'{"a": 1e999}'"""),
    "arguments with a name twice": set_to("sessions", "arguments", """'{"a": 1, "a": 2}'"""),
    "parent that is gone": set_to("sessions", "parent_id", "77"),
    "name of 201 characters": set_to("devices", "name", "substr(hex(zeroblob(200)), 1, 201)"),
    "huge time": set_to("measurements", "median_ms", "1e300"),
    "time that no clock tells": lambda path: edit(
        path, "UPDATE measurements SET p20_ms = 5e-324, median_ms = 5e-324, p80_ms = 5e-324"
    ),
    "median outside of its spread": set_to("measurements", "median_ms", "10 * p80_ms"),
    "digest that is absent": set_to("kernels", "digest", "NULL || id"),
    "columns that are not what a key says": set_to("problems", "seqlen_k", "seqlen_k + 1"),
    "knobs that are not what a config says": set_to("kernels", "num_warps", "8"),
    "form of another access": set_to("kernels", "form", "'general'"),
    "infinite time": set_to("measurements", "median_ms", "9e999"),
    "negative time": set_to("measurements", "median_ms", "-1.0"),
    "time from the future": set_to("measurements", "measured_at", "'2999-01-01T00:00:00.000000Z'"),
    "time in another form": set_to("sessions", "started_at", "'zzzz'"),
    "trial of no kernel": set_to("trials", "kernel_id", "kernel_id + 90"),
    "session of no device": set_to("sessions", "device_id", "99"),
    "text for a number": loosely("devices", "num_sms", "'many'"),
    "blob for text": loosely("devices", "name", "x'00ff'"),
    "null where none may be": lambda path: (
        rewrite_schema("trials", "ended_at TEXT NOT NULL", "ended_at TEXT")(path),
        set_to("trials", "ended_at", "NULL")(path),
    )[0],
    "arguments that are no object": set_to("sessions", "arguments", "'[1]'"),
    "view in place of a table": replaced_by_view,
    "column that computes": rewrite_schema(
        "devices", "name TEXT NOT NULL", "name TEXT GENERATED ALWAYS AS (hex(randomblob(9))) VIRTUAL"
    ),
    "column that is missing": rewrite_schema("trials", "error TEXT", "err TEXT"),
    "table that is missing": lambda path: edit(
        path, "DROP VIEW leaderboard", "DROP VIEW winners", "PRAGMA foreign_keys = OFF", "DROP TABLE measurements"
    ),
}
