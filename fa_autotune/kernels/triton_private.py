"""What Triton keeps private and is touched all the same, here and nowhere else.

Releases differ, so each part is recognised where it is used, not looked up by version, and has a way without it:

* launching: below Triton's public `compiled[grid](...)` lie a launcher in Python, a wrapper that encodes descriptors,
  and a C function. `fast_path` gives what to call and what to fill in, or None: launches then go the public way.
* compiling for a GPU that need not be there: CompileError says what this Triton lacks.
* where compiled kernels are kept, and whether they are read unchecked: as Triton does it.
* what is kept beside a compiled kernel: nothing is kept, and the kernel is compiled again when it is asked for.
* the disassembler: None, and the gates that read machine code see none.
* the interpreter's bfloat16 and bools: a warning that the first may be rounded wrongly.
"""

import copy
import importlib
import inspect
import io
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

from fa_autotune.errors import CompileError
from fa_autotune.kernels.compiled_files import CompiledFiles
from fa_autotune.problem.device import INTERPRETER_ARCH

Encode = Callable[[Any, Any], list[Any]]

_STREAM = object()  # where a launch's stream goes
_PROGRAMS = int("1000003")  # an object of its own, by which the place of their number is found
_files_lock = threading.RLock()

# --- launching --------------------------------------------------------------------------------------------------------


class LaunchForm(StrEnum):
    """What a launch calls, from the quickest to the slowest."""

    SEQUENCE = "the C function, a kernel's arguments in one sequence"
    ONE_BY_ONE = "the C function, a kernel's arguments one by one"
    LAUNCHER = "Triton's launcher"
    PUBLIC = "Triton's public way"


@dataclass(frozen=True, slots=True)
class FastPath:
    """What the launches of a kernel call.

    `function` takes `head`, then a kernel's arguments (one by one, or as one sequence: `is_flat`), in which a
    descriptor is what its encoder makes of it. In `head` the stream and the number of programs have their places.
    """

    function: Callable[..., None]
    form: LaunchForm
    head: list[Any]
    encoders: "dict[int, Encoder]"
    stream_place: int
    programs_place: int
    stream_of: Callable[[int], int]
    hooks: Any

    @property
    def is_flat(self) -> bool:
        """Whether a kernel's arguments follow one by one."""
        return self.form is not LaunchForm.SEQUENCE


def fast_path(compiled: Any, arguments: Sequence[Any], index: int) -> FastPath | None:
    """The way past Triton's launcher for a compiled kernel, which is put on a GPU; None where it is not known.

    `arguments` are those of one launch, by which the launcher is recognised.
    """
    import torch  # noqa: PLC0415 - compile workers start without it

    hooks = _launch_hooks()
    with torch.cuda.device(index), checked_files():
        run = getattr(compiled, "run", None)  # loads the kernel on the current device
    if run is None or hooks is None:
        return None
    descriptors = {place: value for place, value in enumerate(arguments) if is_descriptor(value)}
    encoders: dict[int, Encoder] = {}
    if descriptors:
        opened = _opened(run)
        if opened is None or len(opened[2]) != len(descriptors):
            return None
        run, encode, layouts = opened
        for (place, descriptor), layout in zip(descriptors.items(), layouts, strict=True):
            encoders[place] = encoder = Encoder(encode, descriptor, layout, index)
            if not encoder.is_plain(descriptor):
                return None
    tapped = _tapped(run, compiled, [object() for _ in arguments])
    if tapped is None:
        return None
    form, function, head = tapped
    return FastPath(
        function=function,
        form=form,
        head=head,
        encoders=encoders,
        stream_place=next(place for place, value in enumerate(head) if value is _STREAM),
        programs_place=next(place for place, value in enumerate(head) if value is _PROGRAMS),
        stream_of=_raw_stream() or _stream_of,
        hooks=hooks,
    )


def is_descriptor(value: Any) -> bool:
    """Whether a kernel's argument describes a tensor, and is not the tensor itself."""
    return hasattr(value, "block_shape")


def launch_form(compiled: Any, *, has_descriptors: bool) -> LaunchForm:
    """How a compiled kernel is launched by `fast_path`; it is put on the current GPU."""
    with checked_files():
        run = getattr(compiled, "run", None)
    if has_descriptors:
        run = opened[0] if (opened := _opened(run)) else None
    tapped = None if run is None or _launch_hooks() is None else _tapped(run, compiled, [object()])
    return LaunchForm.PUBLIC if tapped is None else tapped[0]


def put_on_current_gpu(compiled: Any) -> None:
    """Have Triton build a compiled kernel's launcher and load its binary now; else it does so at the first launch."""
    with checked_files():
        _ = getattr(compiled, "run", None)


def is_hooked(hooks: Any) -> bool:
    """Whether a profiler wants the metadata of launches, which only Triton's public way gives."""
    hook = hooks.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None)) or bool(
        getattr(hooks.launch_exit_hook, "calls", hooks.launch_exit_hook is not None)
    )


def _launch_hooks() -> Any:
    """Triton's settings that hold the hooks of launches; None where they are not as expected."""
    import triton  # noqa: PLC0415 - loaded by now: the kernel is compiled

    hooks = getattr(getattr(triton, "knobs", None), "runtime", None)
    return hooks if hasattr(hooks, "launch_enter_hook") and hasattr(hooks, "launch_exit_hook") else None


# What a launcher takes before a kernel's own arguments; it may name them as it likes, but none of these elsewhere.
_HEAD_NAMES = (
    "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
    "launch_exit_hook",
)  # fmt: skip


def _tapped(run: Any, compiled: Any, template: list[Any]) -> tuple[LaunchForm, Callable[..., None], list[Any]] | None:
    """What Triton's launcher calls in the end, and what it hands over before the kernel's arguments.

    These follow one by one (Triton 3.6) or as one sequence (since 3.7). The launcher itself where it does more than
    that, and None where it is not known to take what is meant.
    """
    metadata = getattr(compiled, "packed_metadata", None)
    head = (_PROGRAMS, 1, 1, _STREAM, getattr(compiled, "function", None), metadata, None, None, None)
    if head[4] is None or not _takes_head(run):
        return None
    handed: list[tuple[Any, ...]] = []
    if getattr(run, "global_scratch_size", None) == 0 == getattr(run, "profile_scratch_size", None):
        tapped = copy.copy(run)
        tapped.launch = lambda *values: handed.append(values)
        with suppress(Exception):  # of a launcher that does more; it is itself called then
            tapped(*head, *template)
    if len(handed) == 1 and any(value is _STREAM for value in handed[0]):
        *before, last = handed[0]
        if isinstance(last, (list, tuple)) and _are_same(last, template):
            return LaunchForm.SEQUENCE, run.launch, before
        count = len(handed[0]) - len(template)
        if template and _are_same(handed[0][count:], template):
            return LaunchForm.ONE_BY_ONE, run.launch, list(handed[0][:count])
    return LaunchForm.LAUNCHER, run, list(head)


def _takes_head(run: Any) -> bool:
    """Whether a launcher takes what `_tapped` gives it, in that order."""
    try:
        parameters = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):
        return False
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return False
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return False
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_in_order = all(_HEAD_NAMES.index(name) == place for place, name in enumerate(named) if name in _HEAD_NAMES)
    return is_in_order and len(named) <= len(_HEAD_NAMES)


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _opened(run: Any) -> tuple[Any, Encode, Sequence[Any]] | None:
    """A launcher without the wrapper that encodes descriptors, that encoding, and its data; None if unknown."""
    wrapper = getattr(run, "launch", None)
    code = getattr(wrapper, "__code__", None)
    if wrapper is None or code is None or wrapper.__closure__ is None:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in wrapper.__closure__), strict=True))
    encode = next(_encodings(wrapper.__globals__, cells), None)
    if encode is None or not {"launcher", "tensordesc_meta"} <= cells.keys():
        return None
    opened = copy.copy(run)
    opened.launch = cells["launcher"]
    return opened, encode, cells["tensordesc_meta"]


def _encodings(scope: Mapping[str, Any], cells: Mapping[str, Any]) -> Iterator[Encode]:
    """Triton's encoding of a descriptor: a function of its driver (3.6, 3.7), or handed to the wrapper (since 3.8)."""
    if (of_two := scope.get("make_tensordesc_arg")) is not None:
        yield of_two
    if (of_three := cells.get("make_tensordesc_arg")) is not None:
        yield partial(_without_others, of_three)


def _without_others(encode: Callable[..., list[Any]], descriptor: Any, layout: Any) -> list[Any]:
    """Triton's encoding without the launch's other arguments, which NVIDIA's does not read."""
    return encode(descriptor, layout, ())


@dataclass(frozen=True, slots=True)
class _Address:
    """What Triton asks of a descriptor's tensor when it encodes it."""

    value: int

    def data_ptr(self) -> int:
        return self.value


class Encoder:
    """What a launch takes for a descriptor of one place: its encoding, then shape and strides."""

    def __init__(self, encode: Encode, descriptor: Any, layout: Any, index: int) -> None:
        self._encode, self._layout, self._index = encode, layout, index
        self._prototype = copy.copy(descriptor)
        self._prototype.base = None  # no tensor is kept
        self._rank = len(descriptor.shape)
        self._fill = _filling(encode, self._prototype, layout)

    @property
    def count(self) -> int:
        """How many values a launch takes."""
        return 1 + 2 * self._rank

    def is_plain(self, descriptor: Any) -> bool:
        """Whether Triton encodes a descriptor as is meant here."""
        encoding, *rest = self(descriptor)
        is_pointer = encoding is descriptor.base  # lowered to one
        return not is_pointer and rest == [*descriptor.shape, *descriptor.strides]

    def __call__(self, descriptor: Any) -> list[Any]:
        """All of it, of a descriptor with its tensor."""
        try:
            return self._encode(descriptor, self._layout)
        except RuntimeError:  # perhaps in a thread that has no context yet
            from fa_autotune.kernels.gpu import make_context_current  # noqa: PLC0415 - as in `fast_path`

            make_context_current(self._index)
            return self._encode(descriptor, self._layout)

    def of_address(self, address: int, numbers: Sequence[int]) -> Any:
        """The encoding alone, of a tensor at an address, by its shape and strides."""
        if self._fill is not None:
            with suppress(RuntimeError):  # of a thread without a context, or of what Triton is to complain about
                return self._fill(address, [*numbers[: self._rank]], [*numbers[self._rank :]])
        return self(self.described(_Address(address), numbers))[0]

    def described(self, base: Any, numbers: Sequence[int]) -> Any:
        """The descriptor of a tensor, by its shape and strides."""
        descriptor = object.__new__(type(self._prototype))
        descriptor.__dict__.update(
            self._prototype.__dict__, base=base, shape=[*numbers[: self._rank]], strides=[*numbers[self._rank :]]
        )
        return descriptor


_ADDRESS = int("1000033")  # an object of its own, by which the place of a tensor's address is found


class _Watched:
    """In place of a module, for a function that is to call one function somewhere below it: who is called, and how."""

    def __init__(self, calls: list[tuple[tuple[str, ...], tuple[Any, ...]]], path: tuple[str, ...] = ()) -> None:
        self._calls, self._path = calls, path

    def __getattr__(self, name: str) -> "_Watched":
        return _Watched(self._calls, (*self._path, name))

    def __call__(self, *values: Any) -> "_Watched":
        self._calls.append((self._path, values))
        return self


def _filling(encode: Encode, prototype: Any, layout: Any) -> Callable[[int, list[int], list[int]], Any] | None:
    """The C function that encodes a descriptor, for an address, a shape and strides; None where Triton's function round
    it does more than hand these on. It costs a third of that."""
    around, others = (encode.args[0], ((),)) if isinstance(encode, partial) else (encode, ())
    if not isinstance(around, FunctionType) or "triton" not in around.__globals__:
        return None
    described, calls = copy.copy(prototype), list[tuple[tuple[str, ...], tuple[Any, ...]]]()
    described.base, described.shape, described.strides = _Address(_ADDRESS), [*prototype.shape], [*prototype.strides]
    scope = {**around.__globals__, "triton": _Watched(calls)}
    watched = FunctionType(around.__code__, scope, around.__name__, around.__defaults__, around.__closure__)
    try:
        result, *rest = watched(described, layout, *others)
        ((path, values),) = calls
        function = operator.attrgetter(".".join(path))(around.__globals__["triton"])
        of_address, of_shape, of_strides = (
            [place for place, value in enumerate(values) if value is wanted]
            for wanted in (_ADDRESS, described.shape, described.strides)
        )
        (address_place,), (shape_place,), (strides_place,) = of_address, of_shape, of_strides
    except (AttributeError, TypeError, ValueError, KeyError, AssertionError, RuntimeError):
        return None
    if not isinstance(result, _Watched) or rest != [*described.shape, *described.strides]:
        return None

    def fill(address: int, shape: list[int], strides: list[int]) -> Any:
        handed = [*values]
        handed[address_place], handed[shape_place], handed[strides_place] = address, shape, strides
        return function(*handed)

    return fill


def _raw_stream() -> Callable[[int], int] | None:
    """How Triton asks torch for the current stream of a GPU, as a number.

    None where it does not ask torch: a driver that was made before torch was there has a stream of its own (3.9).
    """
    from triton.runtime import driver  # noqa: PLC0415 - loaded by now: the kernel is compiled

    found: Callable[[int], int] | None = getattr(driver.active, "get_current_stream", None)
    return None if getattr(found, "__self__", None) is driver.active else found


def _stream_of(index: int) -> int:
    import torch  # noqa: PLC0415 - as in `fast_path`

    return torch.cuda.current_stream(index).cuda_stream


# --- compiling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledParts:
    """What is read of a compiled kernel: its TTGIR, its assembly (PTX or AMD GCN), its binary, and what it takes."""

    ttgir: str
    assembly: str
    binary: bytes  # empty where it is not NVIDIA's
    threads: int
    smem_bytes: int
    tensor_memory_columns: int
    is_nvidia: bool


def compile_kernel(
    kernel: Any, *, signature: Mapping[str, str], alignment: Mapping[str, int], options: Mapping[str, Any], arch: str
) -> Any:
    """Compile a Triton or Gluon function for `sm_90`, `gfx942`, …, without a GPU; gives Triton's CompiledKernel.

    `alignment` tells divisors of arguments. The same call in another process finds the result in Triton's cache.
    CompileError where this Triton can't be told all that; else raises what Triton raises.
    """
    import triton  # noqa: PLC0415 - a second or more to import

    try:
        is_gluon, names = kernel.is_gluon(), list(kernel.arg_names)
    except AttributeError as error:
        raise _differs(f"no {error.name} of a function") from error
    if is_gluon:
        source_type = _needed("triton.experimental.gluon._runtime", "GluonASTSource")
    else:
        source_type = _needed("triton.compiler", "ASTSource")
    divisibility = {(names.index(name),): [["tt.divisibility", divisor]] for name, divisor in alignment.items()}
    source = source_type(fn=kernel, signature=dict(signature), constexprs={}, attrs=divisibility)
    with checked_files():
        return triton.compile(source, target=_target(arch), options=dict(options))


@contextmanager
def checked_files() -> Iterator[None]:
    """Have Triton keep what it compiles meanwhile in our cache folder, and read only what is as it was written.

    Not where a user chose another way to keep kernels, or has Triton dump or override them.
    """
    try:
        knobs = _needed("triton", "knobs")
        is_ours = knobs.cache.manager_class is None and not (knobs.compilation.override or knobs.compilation.dump_ir)
        scope = knobs.cache.scope
    except (AttributeError, CompileError):
        is_ours = False
    if not is_ours:
        yield
        return
    with _files_lock, scope():
        knobs.cache.manager_class = CompiledFiles
        yield


def _target(arch: str) -> Any:
    """Triton's GPUTarget; the interpreter's kernels are compiled for sm_90 as a check."""
    target = _needed("triton.backends.compiler", "GPUTarget")
    if arch == INTERPRETER_ARCH:
        arch = "sm_90"
    if arch.startswith("sm_"):
        return target("cuda", int(arch.removeprefix("sm_")), 32)
    return target("hip", arch, 64)


def parts_of(compiled: Any) -> CompiledParts:
    """What is read of Triton's CompiledKernel. CompileError where it keeps that elsewhere."""
    try:
        target, texts = compiled.metadata.target, compiled.asm
        is_nvidia = target.backend == "cuda"
        return CompiledParts(
            ttgir=texts["ttgir"],
            assembly=texts["ptx" if is_nvidia else "amdgcn"],
            binary=texts["cubin"] if is_nvidia else b"",
            threads=compiled.metadata.num_warps * target.warp_size,
            smem_bytes=compiled.metadata.shared,
            tensor_memory_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
            is_nvidia=is_nvidia,
        )
    except AttributeError as error:
        raise _differs(f"no {error.name} of a compiled kernel") from error
    except KeyError as error:
        raise _differs(f"no {error.args[0]} of a compiled kernel") from error


@contextmanager
def kept_assembler_log(*, anew: bool = False) -> Iterator[io.StringIO]:
    """Keep what ptxas says of kernels that are compiled meanwhile; `anew`: also of those in Triton's cache.

    Triton runs ptxas with -v and can print what that said, so nothing has to be assembled twice. CompileError where it
    can't, or does not though it compiled anew: the gates would see neither registers nor spills.
    """
    knobs = _needed("triton", "knobs")
    settings = [("nvidia", "dump_ptxas_log"), *([("compilation", "always_compile")] if anew else [])]
    with ExitStack() as scopes:
        for group_name, name in settings:
            group: Any = getattr(knobs, group_name, None)
            if not hasattr(group, name) or not hasattr(group, "scope"):
                raise _differs(f"no knob {group_name}.{name}")
            scopes.enter_context(group.scope())
            setattr(group, name, True)
        log = scopes.enter_context(redirect_stdout(io.StringIO()))
        yield log
    if anew and not log.getvalue():
        raise _differs("no log of its assembler")


def kept_beside(compiled: Any, name: str) -> str | None:
    """The text that `keep_beside` left under a name, in this process or another; None if it is damaged."""
    folder = _cache_of(compiled)
    known = None if folder is None else folder.get_file(name)
    try:
        return None if known is None else Path(known).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def keep_beside(compiled: Any, name: str, text: str) -> None:
    """Leave a text beside a compiled kernel in Triton's cache."""
    if (folder := _cache_of(compiled)) is not None:
        folder.put(text, name, binary=False)


def _cache_of(compiled: Any) -> Any:
    """Triton's cache folder of a kernel; None where there is no way to it."""
    try:
        with checked_files():
            return _needed("triton.runtime.cache", "get_cache_manager")(compiled.hash)
    except (AttributeError, CompileError):
        return None


def disassembler() -> str | None:
    """The path of Triton's cuobjdump; None where it has none."""
    try:
        path: str = _needed("triton", "knobs").nvidia.cuobjdump.path
    except (AttributeError, CompileError, RuntimeError):
        return None
    return path


def _needed(module: str, name: str) -> Any:
    """A name of one of Triton's modules. CompileError where it is not there."""
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ModuleNotFoundError) as error:
        raise _differs(f"no {module}.{name}") from error


def _differs(what: str) -> CompileError:
    import triton  # noqa: PLC0415

    return CompileError(
        f"Triton {triton.__version__} has {what}, and kernels are compiled ahead and judged by it; install a release "
        "that has, such as 3.7, and report this one"
    )


# --- interpreting -----------------------------------------------------------------------------------------------------


def interpreter_failure(error: Exception) -> str | None:
    """What Triton's interpreter fell over, with its release; None for an error of anything else."""
    import triton  # noqa: PLC0415
    from triton.runtime import errors  # noqa: PLC0415

    kind = getattr(errors, "InterpreterError", None)
    if kind is None or not isinstance(error, kind):
        return None
    return f"the interpreter of Triton {triton.__version__} fails with {error.__cause__ or error}"


@cache
def install_interpreter_shim() -> None:
    """Make Triton's interpreter treat bfloat16 and bools as a GPU does.

    Triton 3.6 to 3.9 keep bfloat16 as raw 16-bit integers there, multiply those integers in `dot`, and truncate on the
    way from fp32. Here dot operands are widened to fp32 first and casts round to nearest even. They also call what a
    comparison gives after its operands, so that one of scalars becomes a block of int32, a mask that 3.9 refuses.
    """
    import numpy  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    builder: Any = getattr(interpreter, "InterpreterBuilder", None)
    handle_type: Any = getattr(interpreter, "TensorHandle", None)
    if handle_type is None or not all(hasattr(builder, name) for name in ("create_dot", "cast_impl", "binary_op")):
        warnings.warn(
            "Triton's interpreter is not built as we know it: it may round bfloat16 wrongly; a Triton that "
            "`fa-autotune doctor` calls tested does not",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    def widen(data: Any) -> Any:
        return (data.astype(numpy.uint32) << 16).view(numpy.float32)

    def narrow(data: Any) -> Any:
        bits = numpy.ascontiguousarray(data).view(numpy.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
        quiet_nan = ((bits >> 16) | 0x40).astype(numpy.uint16)
        return numpy.where(numpy.isnan(data), quiet_nan, rounded)

    plain_dot, plain_cast, plain_binary = builder.create_dot, builder.cast_impl, builder.binary_op

    def operand(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return handle_type(widen(handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, operand(a), operand(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return handle_type(widen(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return handle_type(narrow(source.data), tl.bfloat16)
        return plain_cast(self, source, target)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = plain_binary(self, left, right, operation)
        return handle_type(result.data, tl.int1) if result.data.dtype == numpy.bool_ else result

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    builder.binary_op = binary_op
