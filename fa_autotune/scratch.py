"""Device memory that kernels with a tile counter take and leave zeroed, so that no launch has to clear it.

Launches on one stream follow each other and share a piece; streams run side by side and do not. A launch that a CUDA
graph captures gets a piece of its own for good: the graph may be replayed on any stream.
"""

import threading

import torch
from torch import Tensor

SLOT_INTS = 8  # 32 bytes: pieces share no sector of the L2 cache
CHUNK_SLOTS = 1024
LOW_SLOTS = 512  # captured launches that find a piece even where nothing can be cleared for them

_lock = threading.Lock()
_by_stream: dict[tuple[int, int], Tensor] = {}
_free: dict[int, list[Tensor]] = {}


def scratch_of(index: int) -> Tensor:
    """Zeroed int32 for a launch on the current stream of GPU `index`, SLOT_INTS of them."""
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return scratch_of(index)
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(index)
    stream = torch.cuda.current_stream(index).cuda_stream
    found = _by_stream.get((index, stream))
    if found is None or len(_free[index]) < LOW_SLOTS:
        prepare_scratch(index)
        with _lock:
            found = _by_stream.get((index, stream))
            if found is None:
                found = _by_stream[index, stream] = _free[index].pop()
    return found


def prepare_scratch(index: int) -> None:
    """Have pieces ready on a GPU, so that captured launches need not clear theirs. Not while a capture is under way."""
    with _lock:
        free = _free.setdefault(index, [])
        if len(free) < LOW_SLOTS:
            chunk = torch.zeros(CHUNK_SLOTS, SLOT_INTS, dtype=torch.int32, device=torch.device("cuda", index))
            torch.cuda.current_stream(index).synchronize()  # other streams use it, and nothing orders them after this
            free.extend(chunk.unbind())


def _for_capture(index: int) -> Tensor:
    with _lock:
        free = _free.get(index)
        if free:
            return free.pop()
    return torch.zeros(SLOT_INTS, dtype=torch.int32, device=torch.device("cuda", index))  # each replay clears it
