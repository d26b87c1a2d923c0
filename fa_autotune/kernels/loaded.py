"""Load generated kernels and call them.

On a GPU the kernel compiled ahead is launched on the tensors' device and its current stream. In a process started with
TRITON_INTERPRET=1, CPU tensors run through Triton's interpreter instead.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import CompileError, FaAutotuneError, LaunchError, MachineError
from fa_autotune.kernels.faults import MAX_ERROR_CHARACTERS, is_machines
from fa_autotune.kernels.gpu import bind_thread, num_sms_of
from fa_autotune.kernels.interpreter import interpreted
from fa_autotune.kernels.modules import ModuleFile, candidates_dir, compile_module, load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.kernels.scratch import SLOT_INTS, prepare_scratch, scratch_of
from fa_autotune.kernels.triton_private import put_on_current_gpu
from fa_autotune.paths import interpreting, triton_cache_dir
from fa_autotune.space.candidate import Candidate

MAX_GRID = 2**31 - 1


class LoadedKernel:
    """A candidate's kernel, ready to be called on one device."""

    def __init__(self, candidate: Candidate, file: ModuleFile, arch: str, device_index: int | None = None) -> None:
        """Load a candidate's generated module and compile its kernel, or find it in the cache. CompileError.

        The binary is put on GPU `device_index` now; without one, on the GPU of the first call, when that comes.
        """
        self.candidate = candidate
        self.module: ModuleType = load_module(file)
        family = candidate.family
        # What `AttentionFamily` works out each time that it is asked, and each binding asks for.
        self.operands = (*family.kernel_pass.spec.takes, *family.outputs)
        self.extra_tensors, self.numbers = family.extra_tensors, family.numbers
        tensors = (*self.operands, *self.extra_tensors)
        self.owner = tensors.index(family.kernel_pass.spec.owns)
        self._starts = tensors.index("cu_seqlens_q") if family.varlen else None
        self.compiled: Any = None if interpreting() else compile_module(self.module, arch)  # Triton's CompiledKernel
        self.run = interpreted(self.module) if interpreting() else _compiled(self.compiled)
        self.launchers: dict[int, Any] = {}  # of `fast_launch`, by the index of a GPU
        # Persistent kernels have a program per SM and take a tile counter.
        self.is_persistent = hasattr(self.module, "SCRATCH_INTS")
        assert getattr(self.module, "SCRATCH_INTS", 0) <= SLOT_INTS
        if self.compiled is not None and device_index is not None:
            if self.is_persistent:
                prepare_scratch(device_index)
            with torch.cuda.device(device_index):
                put_on_current_gpu(self.compiled)

    def __call__(self, *values: Any) -> None:
        """Run the kernel on what its module's `arguments` takes: the tensors of the family, then its numbers.

        Tensors are named by `AttentionFamily.tensors`: inputs, outputs, which are written, and those of features. A
        fused kernel leaves turns at 0 again, and an unordered one adds to dq_acc. Those of features are fp32 (batch,
        num_q_heads) and sequences' starts int32 (sequences + 1), where the batch is that of the sequences and 1 for all
        else. Others are (batch, heads, seqlen, head_dim), none of them empty; lse and delta are contiguous fp32 (batch,
        num_q_heads, seqlen_q), lse in natural log; what the fused backward's kernels hand on has the sizes of
        `space.workspace`. The kernel runs on the tensors' device and its current stream.
        """
        owner: Tensor = values[self.owner]
        grid = self.grid(*values)
        if owner.is_cuda:
            bind_thread(owner.device.index)
        arguments = self.module.arguments(*values, *self.scratch(owner.device))
        if owner.is_cuda and owner.device.index != torch.cuda.current_device():
            with torch.cuda.device(owner.device):
                self.run(grid, arguments)
        else:
            self.run(grid, arguments)

    def grid(self, *values: Any) -> tuple[int, ...]:
        """The programs of a call with these values; LaunchError if a launch can't take that many."""
        owner: Tensor = values[self.owner]
        num_sms = (num_sms_of(owner.device.index),) if self.is_persistent else ()
        batch_size = owner.shape[0] if self._starts is None else values[self._starts].shape[0] - 1
        return self.grid_of(batch_size, owner.shape[1], owner.shape[2], *num_sms)

    def grid_of(self, batch_size: int, num_heads: int, length: int, *num_sms: int) -> tuple[int, ...]:
        """The programs for tensors of such extents; of packed sequences: their number, and all rows of a head."""
        grid: tuple[int, ...] = self.module.grid(batch_size, num_heads, length, *num_sms)
        if grid[0] > MAX_GRID:
            raise LaunchError(f"{grid[0]} programs, a launch takes at most {MAX_GRID}: split the batch")
        return grid

    def scratch(self, device: torch.device) -> tuple[Tensor, ...]:
        """What a launch on a device's current stream takes after a call's values: a tile counter, or nothing."""
        return (scratch_of(device.index),) if self.is_persistent else ()


def load_kernel(candidate: Candidate, arch: str, device_index: int | None = None) -> LoadedKernel:
    """Render a candidate, write its module to the cache folder and load it.

    TemplateError, CompileError, MachineError.
    """
    file = write_module(render(candidate), candidates_dir())
    try:
        return LoadedKernel(candidate, file, arch, device_index)
    except FaAutotuneError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        if is_machines(error):
            raise MachineError(
                f"the {candidate.variant} kernel of {candidate.family.label} could not be compiled here: {text}; check "
                f"disk and memory, and {triton_cache_dir()} (FA_AUTOTUNE_CACHE names another place)"
            ) from error
        raise CompileError(
            f"the {candidate.variant} kernel of {candidate.family.label} does not compile or load for {arch}: {text}; "
            f"it is {file.path}, and `fa-autotune doctor` says what may be missing"
        ) from error


def _compiled(compiled: Any) -> Callable[[tuple[int, ...], Sequence[Any]], None]:
    def run(grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        compiled[grid](*arguments)

    return run
