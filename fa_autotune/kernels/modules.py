"""Generated modules: written for people and debuggers to read, run from the text that was rendered.

What is run is never read back from a disk: Python compiles the text itself, without bytecode files, and where Triton
asks for a kernel's source again, it gets the same text.
"""

import linecache
import sys
import threading
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from fa_autotune.errors import CompileError, MachineError
from fa_autotune.files import holds, write_whole
from fa_autotune.kernels.render import KernelSource
from fa_autotune.kernels.triton_private import compile_kernel
from fa_autotune.paths import cache_dir, own_cache_folder

_import_lock = threading.Lock()
_loaded: "dict[ModuleFile, ModuleType]" = {}
_sources: dict[str, tuple[int, None, list[str], str]] = {}  # entries of Python's linecache


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """A generated module: the text to run, and the file that holds it."""

    path: Path
    text: str


def candidates_dir() -> Path:
    """Folder of generated candidates, in the cache folder."""
    return cache_dir() / "kernels"


def write_module(source: KernelSource, folder: Path) -> ModuleFile:
    """Write a generated module unless the same bytes are there; whatever else has its name makes way.

    MachineError if the folder can't be written, or if another user could write it.
    """
    path = folder / f"{source.name}.py"
    content = source.text.encode()
    try:
        own_cache_folder(folder)
        if not holds(path, content):
            write_whole(path, content, durable=False)
    except OSError as error:
        raise MachineError(
            f"{path} can't be written ({error.strerror or error}), and generated kernels are kept there; make {folder} "
            "writable and see that its disk has space, or set FA_AUTOTUNE_CACHE to another folder"
        ) from error
    return ModuleFile(path, source.text)


def load_module(file: ModuleFile) -> ModuleType:
    """Run a generated module's text, once per process; CompileError if that fails."""
    name = f"fa_autotune_generated.{file.path.stem}"
    with _import_lock:
        if (known := _loaded.get(file)) is not None:
            return known
        module = ModuleType(name)
        module.__file__ = str(file.path)
        _sources[str(file.path)] = len(file.text), None, list(StringIO(file.text)), str(file.path)
        keep_source(module)
        sys.modules[name] = module  # where a function's module is looked up
        try:
            exec(compile(file.text, str(file.path), "exec", dont_inherit=True), module.__dict__)
        except (MemoryError, OSError):  # no fault of the module
            raise
        except Exception as error:
            raise CompileError(
                f"generated module {file.path} does not import: {type(error).__name__}: {error}"
            ) from error
        _loaded[file] = module
        return module


def keep_source(module: ModuleType) -> None:
    """Have Python find the text that a generated module was made from, whatever its file holds by now.

    Triton asks for it when a kernel is made, and its interpreter at the first launch. Without a time of change an entry
    is never compared with the file.
    """
    if entry := _sources.get(str(getattr(module, "__file__", None))):
        linecache.cache[str(module.__file__)] = entry


def compile_module(module: ModuleType, arch: str) -> Any:
    """Compile a generated module's kernel for an arch, without a GPU; gives Triton's CompiledKernel.

    The compile form is the module's own SIGNATURE and ALIGNMENT, so that lengths are never specialised; the same call
    in another process finds the result in the cache. Raises what Triton raises.
    """
    keep_source(module)
    return compile_kernel(
        module.KERNEL, signature=module.SIGNATURE, alignment=module.ALIGNMENT, options=module.OPTIONS, arch=arch
    )
