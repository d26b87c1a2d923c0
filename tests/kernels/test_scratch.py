"""Memory of tile counters: one piece for each stream, one for good for each captured launch, never one for two."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fa_autotune.kernels import scratch
from fa_autotune.kernels.scratch import CHUNK_SLOTS, LOW_SLOTS, SLOT_INTS, prepare_scratch, scratch_address, scratch_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Pretended GPUs whose memory is the host's; tests set the current device and stream, and whether it captures."""
    state = SimpleNamespace(device=0, stream=70, capturing=False, made=[], makers=[], synchronized=[])

    def zeros(index: int, *size: int) -> torch.Tensor:
        state.made.append((index, size, state.capturing))
        state.makers.append(threading.get_ident())
        return torch.zeros(size, dtype=torch.int32)

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, state.device = state.device, index
        yield
        state.device = before

    def current_stream(index: int) -> SimpleNamespace:
        stream = state.stream
        return SimpleNamespace(cuda_stream=stream, synchronize=lambda: state.synchronized.append(stream))

    for name in ("_chunks", "_free", "_by_stream", "_addresses"):
        monkeypatch.setattr(scratch, name, type(getattr(scratch, name))())
    monkeypatch.setattr(scratch, "_zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def captured(gpu: SimpleNamespace, count: int) -> list[int]:
    """The addresses that so many captured launches take."""
    gpu.capturing = True
    found = [scratch_address(gpu.device, gpu.stream) for _ in range(count)]
    gpu.capturing = False
    return found


def test_launches_on_one_stream_share_a_piece_and_streams_do_not(gpu: SimpleNamespace) -> None:
    pieces = []
    for stream in (70, 71, 70, 71):
        gpu.stream = stream
        pieces.append(scratch_of(0).data_ptr())
    assert pieces[:2] == pieces[2:]
    assert abs(pieces[0] - pieces[1]) >= 4 * SLOT_INTS


def test_the_same_stream_of_two_gpus_has_two_pieces(gpu: SimpleNamespace) -> None:
    assert scratch_of(0).data_ptr() != scratch_of(1).data_ptr()
    assert [index for index, _, _ in gpu.made] == [0, 1]
    assert gpu.device == 0


def test_the_short_way_gives_what_the_long_way_gave(gpu: SimpleNamespace) -> None:
    first = scratch_address(0, 70)
    assert first == scratch_of(0).data_ptr() == scratch_address(0, 70)


def test_the_short_way_asks_torch_for_no_stream_that_is_known(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scratch_address(0, 70)
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    assert scratch_address(0, 70) == first


def test_a_captured_launch_gets_a_piece_that_nobody_else_has(gpu: SimpleNamespace) -> None:
    own = scratch_address(0, 70)
    pieces = captured(gpu, 20)
    assert len({own, *pieces}) == 21
    assert scratch_address(0, 70) == own


def test_a_capture_makes_no_memory_while_pieces_are_left(gpu: SimpleNamespace) -> None:
    prepare_scratch(0)
    captured(gpu, CHUNK_SLOTS)
    assert gpu.made == [(0, (CHUNK_SLOTS, SLOT_INTS), False)]


def test_a_capture_past_the_last_piece_clears_one_of_its_own(gpu: SimpleNamespace) -> None:
    prepare_scratch(0)
    pieces = captured(gpu, CHUNK_SLOTS + 1)
    assert gpu.made[1:] == [(0, (SLOT_INTS,), True)]
    assert len(set(pieces[:-1])) == CHUNK_SLOTS


def test_the_next_launch_outside_of_a_capture_gets_more_pieces_ready(gpu: SimpleNamespace) -> None:
    own = scratch_address(0, 70)
    captured(gpu, CHUNK_SLOTS - LOW_SLOTS - 1)  # one is the stream's
    assert scratch_address(0, 70) == own
    assert len(gpu.made) == 1
    captured(gpu, 1)
    assert scratch_address(0, 70) == own
    assert len(gpu.made) == 2
    pieces = captured(gpu, CHUNK_SLOTS)
    assert len(gpu.made) == 2
    assert own not in pieces


def test_the_memory_of_a_captured_launch_is_never_freed(gpu: SimpleNamespace) -> None:
    """A graph knows an address only."""
    prepare_scratch(0)
    pieces = captured(gpu, CHUNK_SLOTS)
    starts = [chunk.data_ptr() for chunk in scratch._chunks]
    assert {(piece - starts[0]) // (4 * SLOT_INTS) for piece in pieces} == set(range(CHUNK_SLOTS))


def test_fresh_pieces_are_zero_before_another_stream_uses_them(gpu: SimpleNamespace) -> None:
    piece = scratch_of(0)
    assert (piece.dtype, piece.shape, piece.any().item()) == (torch.int32, (SLOT_INTS,), False)
    assert gpu.synchronized == [70]


def test_threads_that_start_together_agree(gpu: SimpleNamespace) -> None:
    barrier, found = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(scratch_address(0, 70))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(gpu.made) == 1


def test_pieces_are_made_in_a_thread_of_its_own_and_those_of_a_capture_in_its_own(gpu: SimpleNamespace) -> None:
    """What a thread allocates may go to the memory of CUDA graphs, which is used again."""
    gpu.capturing = True
    scratch_of(0)  # nothing was prepared: it is cleared in each replay
    gpu.capturing = False
    assert gpu.makers == [threading.get_ident()]
    scratch_of(0)
    assert len(gpu.makers) == 2
    assert gpu.makers[1] != threading.get_ident()
