"""FlashAttention-2 kernels generated from templates, tuned on the live GPU, and dispatched from model code.

Importing this package loads nothing heavy: each name below is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fa_autotune.errors import (
    CompileError,
    DatabaseError,
    FaAutotuneError,
    InvalidConfigError,
    InvalidPackError,
    InvalidProblemError,
    LaunchError,
    MachineError,
    NoKernelError,
    SchemaTooNewError,
    TemplateError,
    UnsupportedError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)

if TYPE_CHECKING:
    from fa_autotune.database import TuningDatabase
    from fa_autotune.jobs import tune
    from fa_autotune.ops.api import attention, attention_varlen, explain, flush_misses, warmup
    from fa_autotune.ops.flash_attn import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from fa_autotune.ops.sdpa import scaled_dot_product_attention
    from fa_autotune.problem.problem import AttentionProblem
    from fa_autotune.reference.dropout import dropout_mask

__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionProblem",
    "CompileError",
    "DatabaseError",
    "FaAutotuneError",
    "InvalidConfigError",
    "InvalidPackError",
    "InvalidProblemError",
    "LaunchError",
    "MachineError",
    "NoKernelError",
    "SchemaTooNewError",
    "TemplateError",
    "TuningDatabase",
    "UnsupportedError",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
    "__version__",
    "attention",
    "attention_varlen",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flush_misses",
    "scaled_dot_product_attention",
    "tune",
    "warmup",
]

_MODULE_BY_NAME = {
    "AttentionProblem": "problem.problem",
    "TuningDatabase": "database",
    "attention": "ops.api",
    "attention_varlen": "ops.api",
    "dropout_mask": "reference.dropout",
    "explain": "ops.api",
    "flash_attn_func": "ops.flash_attn",
    "flash_attn_kvpacked_func": "ops.flash_attn",
    "flash_attn_qkvpacked_func": "ops.flash_attn",
    "flash_attn_varlen_func": "ops.flash_attn",
    "flash_attn_varlen_kvpacked_func": "ops.flash_attn",
    "flash_attn_varlen_qkvpacked_func": "ops.flash_attn",
    "flush_misses": "ops.api",
    "scaled_dot_product_attention": "ops.sdpa",
    "tune": "jobs",
    "warmup": "ops.api",
}

# Names that the public surface will have, and what serves in their place today.
_PLANNED = {
    "flash_attn_with_kvcache": "call `attention` on the filled part of the cache",
    "record_problems": "call `attention` and tune what it missed: `flush_misses()`, then `fa-autotune tune --missed`",
}


def __getattr__(name: str) -> Any:
    if module := _MODULE_BY_NAME.get(name):
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value
    if instead := _PLANNED.get(name):
        raise AttributeError(f"fa_autotune.{name} is not there yet in {__version__}; until then {instead}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
