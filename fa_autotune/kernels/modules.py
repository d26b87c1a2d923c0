"""Generated modules on disk: write them, import them, and compile their kernel ahead of time.

Triton reads a kernel's source through its file, so a rendered module is always written before it is imported.
"""

import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from fa_autotune.errors import CompileError, FaAutotuneError
from fa_autotune.kernels.gluon_names import give_names
from fa_autotune.kernels.render import KernelSource
from fa_autotune.kernels.triton_private import compile_kernel
from fa_autotune.paths import cache_dir

# Options that a module leaves open; a Triton that does not know one passes over it.
_UNSAID = {"enable_fp_fusion": True}  # as Triton 3.6 to 3.9 do; 3.9 warns that the next one will not
_OF_FUSED = {"sched4reg": True}  # in the order of instructions that Triton 3.9 takes else, most spill in their loops
_FUSED_KERNEL = "attention_bwd_fused"

_import_lock = threading.Lock()


def candidates_dir() -> Path:
    """Folder of generated candidates, in the cache folder."""
    return cache_dir() / "kernels"


def write_module(source: KernelSource, folder: Path) -> Path:
    """Write a generated module unless the same text is there; atomic, so that readers see a whole file.

    FaAutotuneError if the folder can't be written.
    """
    path = folder / f"{source.name}.py"
    try:
        if not (path.is_file() and path.read_text() == source.text):
            write_whole(path, source.text)
    except OSError as error:
        raise FaAutotuneError(
            f"{path} can't be written ({error.strerror}), and Triton compiles from files only; make {folder} "
            "writable, or set FA_AUTOTUNE_CACHE to a folder that is"
        ) from error
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file in a folder that is made if need be; readers see the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_module(path: Path) -> ModuleType:
    """Import a generated module once per process; CompileError if it does not import."""
    name = f"fa_autotune_generated.{path.stem}"
    with _import_lock:
        if (known := sys.modules.get(name)) is not None and known.__file__ == str(path):
            return known
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise CompileError(f"{path} is not a Python module; render it again")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise CompileError(f"generated module {path} does not import: {type(error).__name__}: {error}") from error
        give_names(module)
        return module


def compile_module(module: ModuleType, arch: str) -> Any:
    """Compile a generated module's kernel for an arch, without a GPU; gives Triton's CompiledKernel.

    The compile form is the module's own SIGNATURE and ALIGNMENT, so that lengths are never specialised; the same call
    in another process finds the result in Triton's cache. Raises what Triton raises.
    """
    options = {**_UNSAID, **(_OF_FUSED if module.KERNEL.__name__ == _FUSED_KERNEL else {}), **module.OPTIONS}
    return compile_kernel(
        module.KERNEL, signature=module.SIGNATURE, alignment=module.ALIGNMENT, options=options, arch=arch
    )
