"""The kernels that this process has decided on and loaded, for each GPU and for Triton's interpreter.

Nothing is ever tuned here, and nothing is compiled or loaded inside a CUDA-graph capture.
"""

import threading

import torch

from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.errors import CompileError, InvalidProblemError, LaunchError
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate

INTERPRETER_INDEX = -1  # in place of a GPU's index

_lock = threading.RLock()
_kernels: dict[tuple[int, Candidate], LoadedKernel] = {}
_dispatchers: dict[int, Dispatcher] = {}


def kernel_for(problem: AttentionProblem, index: int, *, ahead: bool = False) -> LoadedKernel:
    """The kernel that dispatch chooses for a problem on a GPU, compiled and loaded once.

    `ahead`: it may never run, so the problem does not count as one that was met. NoKernelError, CompileError;
    LaunchError if it is not loaded and a capture is under way.
    """
    with _lock:
        dispatcher = dispatcher_of(index)
        while True:
            candidate = dispatcher.choose(problem, ahead=ahead).candidate
            try:
                return _loaded(candidate, problem, dispatcher, index)
            except CompileError as error:
                if not dispatcher.lose(problem.family.kernel_pass, candidate.variant, str(error)):
                    raise


def _loaded(candidate: Candidate, problem: AttentionProblem, dispatcher: Dispatcher, index: int) -> LoadedKernel:
    kernel = _kernels.get((index, candidate))
    if kernel is None:
        if index >= 0 and torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                f"the kernel for {problem.label} is not loaded and a CUDA-graph capture is under way; call "
                f"fa_autotune.warmup(['{problem.key}']), or with backward=True on the forward's, or run the "
                "model once before capturing"
            )
        kernel = load_kernel(candidate, dispatcher.device.arch, index if index >= 0 else None)
        _kernels[index, candidate] = kernel
    return kernel


def dispatcher_of(index: int) -> Dispatcher:
    """The dispatcher of a GPU, made when it is first asked for."""
    with _lock:
        found = _dispatchers.get(index)
        if found is None:
            found = Dispatcher(device=live_device(max(index, 0)), triton_version=live_toolchain().triton)
            _dispatchers[index] = found
        return found


def flush_misses() -> int:
    """Append the problems that ran without a winner of their own to the user's database; gives their number.

    `fa-autotune tune --missed` tunes them. Happens by itself at exit.
    """
    with _lock:
        return sum(dispatcher.flush_misses() for dispatcher in _dispatchers.values())


def device_index(device: torch.device | str | int | None) -> int:
    """A GPU's index, the current one's for None; the interpreter's in a process that interprets kernels."""
    if interpreting():
        return INTERPRETER_INDEX
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    except (RuntimeError, TypeError) as error:
        raise InvalidProblemError(f"device={device!r} is no device: {error}; write it like cuda:0") from None
    if chosen.type != "cuda":
        raise InvalidProblemError(f"device={device!r} is no GPU; kernels run on cuda devices, such as cuda:0")
    if chosen.index is not None:
        return chosen.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0
