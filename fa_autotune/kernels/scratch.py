"""Device memory that kernels with a tile counter take and leave zeroed, so that no launch has to clear it.

Launches on one stream follow each other and share a piece; streams run side by side and do not. A launch that a CUDA
graph captures gets a piece of its own for good: the graph may be replayed on any stream.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SLOT_INTS = 8  # 32 bytes: pieces share no sector of the L2 cache
CHUNK_SLOTS = 1024
LOW_SLOTS = 512  # captured launches that find a piece even where nothing can be cleared for them

_lock = threading.Lock()
_chunks: list[Tensor] = []  # never freed: graphs and bound launches know addresses only
_free: dict[int, list[Tensor]] = {}
_by_stream: dict[tuple[int, int], Tensor] = {}
_addresses: dict[tuple[int, int], int] = {}  # of the pieces above; empty where pieces run low


def scratch_of(index: int) -> Tensor:
    """Zeroed int32 for a launch on the current stream of GPU `index`, SLOT_INTS of them."""
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return scratch_of(index)
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(index)
    prepare_scratch(index)
    key = index, torch.cuda.current_stream(index).cuda_stream
    with _lock:
        if key not in _by_stream:
            _by_stream[key] = _free[index].pop()
        _addresses[key] = _by_stream[key].data_ptr()
        return _by_stream[key]


def scratch_address(index: int, stream: int) -> int:
    """The address of `scratch_of`, in little time where the stream is known. GPU `index` is current, and so is its
    `stream`."""
    if not torch.cuda.is_current_stream_capturing() and (known := _addresses.get((index, stream))):
        return known
    return scratch_of(index).data_ptr()


def prepare_scratch(index: int) -> None:
    """Have pieces ready on a GPU, so that captured launches need not clear theirs. Not while a capture is under way."""
    with _lock:
        free = _free.setdefault(index, [])
        if len(free) < LOW_SLOTS:
            # In a thread of its own: while a compiled model warms CUDA graphs up, all that its thread allocates goes
            # to the graphs' memory, which is used again when they are recorded.
            with ThreadPoolExecutor(1) as helper:
                chunk = helper.submit(_cleared, index).result()
            _chunks.append(chunk)
            free.extend(chunk.unbind())


def _cleared(index: int) -> Tensor:
    with torch.cuda.device(index):
        chunk = _zeros(index, CHUNK_SLOTS, SLOT_INTS)
        torch.cuda.current_stream(index).synchronize()  # other streams use it, and nothing orders them after this
        return chunk


def _for_capture(index: int) -> Tensor:
    with _lock:
        if free := _free.get(index):
            if len(free) <= LOW_SLOTS:
                _addresses.clear()  # so that the next launch outside of a capture gets more
            return free.pop()
    return _zeros(index, SLOT_INTS)  # each replay clears it


def _zeros(index: int, *size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=torch.device("cuda", index))
