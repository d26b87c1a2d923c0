"""Jobs for tests of the compiler, which an interpreting process can't do: at the top of an importable module."""

from fa_autotune.kernels.compiler import _compiled_text
from fa_autotune.kernels.gates import CompiledText
from fa_autotune.kernels.modules import ModuleFile, load_module


def compiled_text(file: ModuleFile) -> CompiledText:
    """What the gates read of a generated module's kernel, compiled for Hopper."""
    return _compiled_text(load_module(file), "sm_90")[0]
