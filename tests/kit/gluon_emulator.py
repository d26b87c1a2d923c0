"""Runs a generated Gluon kernel on a CPU: its own functions on torch tensors, with stand-ins for what they call.

Gluon has no interpreter. This one knows what those kernels use: partitions of warps that run side by side, mbarriers,
descriptors, asynchronous products and copies. Partitions take turns at random and loads arrive at random, by a seed;
nothing is timed. It shows wrong values, and what a GPU would show as a hang or as a race:

* all wait and nothing is on its way;
* a product or a copy whose operands change before it was waited for, or were never written (NaN);
* a result that is used before it was waited for, which has no value here.

It knows nothing of layouts, of threads inside a warpgroup, and of the fences between paths to shared memory.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fa_autotune.reference.dropout import STEPS, kept_of

NAN = float("nan")
WRONG_NUMBER = -(2**30)  # what integers in memory hold before something is stored
WRONG_PAIR = 0x4D4D  # of bools: both true
PATIENCE_S = 60.0  # for a partition that neither ends nor waits
ARRIVAL_RATE = 0.4  # how often a load that is on its way arrives before a partition goes on
THREADS_PER_WARPGROUP = 128

_running = threading.local()  # .agent: whose thread it is


class EmulatorError(AssertionError):
    """What a GPU would show as a hang, a race or rubbish."""


@dataclass(eq=False)
class Agent:
    """The warps of a partition: a thread that runs while it has the baton, and hands it back where it may wait."""

    program: int
    name: str
    work: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    waits_for: str = "its start"
    baton: threading.Event = field(default_factory=threading.Event)
    done: bool = False
    products: list["Product"] = field(default_factory=list)
    copies: list["Copy"] = field(default_factory=list)
    own_copies: list[Callable[[], Any]] = field(default_factory=list)  # to shared memory, each a group of its own
    last_turn: tuple[int, int] | None = None  # which counter it read last, and what that held


class Machine:
    """A GPU: programs in the order of their numbers, so many side by side, and loads that are on their way."""

    def __init__(self, seed: int, num_sms: int) -> None:
        self.random = random.Random(seed)
        self.num_sms = num_sms
        self.arrivals: list[Callable[[], None]] = []
        self.back = threading.Event()
        self.error: BaseException | None = None
        self.is_over = False

    def run(self, start: Callable[[int], list[Agent]], programs: int) -> None:
        """Run programs to their ends; `start(program)` gives the agents of one."""
        agents: list[Agent] = []
        try:
            self._take_turns(agents, start, programs)
        finally:
            self.is_over = True
            for agent in agents:  # those that are left after an error
                agent.baton.set()

    def _take_turns(self, agents: list[Agent], start: Callable[[int], list[Agent]], programs: int) -> None:
        started = 0
        while True:
            agents[:] = [agent for agent in agents if not agent.done]
            while started < programs and len({agent.program for agent in agents}) < self.num_sms:
                agents += self._launched(start(started))
                started += 1
            if not agents:
                break
            able = [agent for agent in agents if agent.ready()]
            if self.arrivals and (not able or self.random.random() < ARRIVAL_RATE):
                self.arrivals.pop(self.random.randrange(len(self.arrivals)))()
                continue
            if not able:
                waiting = (f"{agent.name} of program {agent.program} for {agent.waits_for}" for agent in agents)
                raise EmulatorError(f"hang: all wait: {'; '.join(waiting)}")
            self._pass_to(self.random.choice(able))
        while self.arrivals:
            self.arrivals.pop()()

    def _launched(self, agents: list[Agent]) -> list[Agent]:
        for agent in agents:
            threading.Thread(target=self._body, args=(agent,), daemon=True).start()
        return agents

    def _body(self, agent: Agent) -> None:
        _running.agent = agent
        try:
            self._take_baton(agent)
            agent.work()
            if agent.copies:
                raise EmulatorError(
                    f"race: {agent.name} ends, and with it shared memory, before its copies have read that"
                )
        except BaseException as error:  # noqa: BLE001 - raised again by whoever runs the machine
            self.error = error
        agent.done = True
        self.back.set()

    def _pass_to(self, agent: Agent) -> None:
        agent.baton.set()
        if not self.back.wait(PATIENCE_S):
            raise EmulatorError(f"{agent.name} runs on and on")
        self.back.clear()
        if self.error is not None:
            raise self.error

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Hand the baton back until something is so."""
        agent: Agent = _running.agent
        agent.ready, agent.waits_for = ready, what
        self.back.set()
        self._take_baton(agent)

    def _take_baton(self, agent: Agent) -> None:
        agent.baton.wait()
        agent.baton.clear()
        if self.is_over:
            raise EmulatorError("another agent failed")


class Memory:
    """A view of shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, place: int) -> "Memory":
        return Memory(self.values[place])

    def reshape(self, shape: Sequence[int]) -> "Memory":
        return Memory(self.values.view(*shape))

    def permute(self, order: Sequence[int]) -> "Memory":
        return Memory(self.values.permute(*order))

    def slice(self, start: int, length: int, dim: int) -> "Memory":
        return Memory(self.values.narrow(dim, start, length))

    def load(self, _layout: object) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        assert values.dtype is self.values.dtype, (values.dtype, self.values.dtype)
        assert values.shape == self.values.shape, (values.shape, self.values.shape)
        self.values.copy_(values)


class Barrier:
    """An mbarrier: a phase ends when as many have arrived as it counts, and all bytes that they announced."""

    def __init__(self, count: int = 0) -> None:
        self.count = self.left = count
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1) -> None:
        self.left -= count
        assert self.left >= 0, "more arrivals than a barrier counts"
        self.settle()

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.count


class Barriers:
    """Memory that holds barriers."""

    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, place: int) -> Barrier:
        return self.all[place]


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))


class Product:
    """An asynchronous matrix product: has no value until it was waited for."""

    def __init__(self, left: Tensor | Memory, right: Memory, accumulator: "Tensor | Product", use_acc: bool) -> None:
        self.operands = [one.values if isinstance(one, Memory) else one for one in (left, right)]
        self.seen = [one.clone() for one in self.operands]
        self.accumulator, self.use_acc = accumulator, use_acc
        self.value: Tensor | None = None

    def finish(self) -> None:
        if not all(map(_same, self.operands, self.seen)):
            raise EmulatorError("race: an operand changed while its product was computed")
        accumulator = self.accumulator.value if isinstance(self.accumulator, Product) else self.accumulator
        assert accumulator is not None
        product = self.seen[0].double() @ self.seen[1].double()  # in which no order of terms shows
        self.value = (product + accumulator if self.use_acc else product).float()


class Copy:
    """A copy from shared memory."""

    def __init__(self, source: Tensor) -> None:
        self.source, self.seen = source, source.clone()

    def finish(self) -> None:
        if not _same(self.source, self.seen):
            raise EmulatorError("race: what a copy reads changed before it was waited for")


class Pointer:
    """The address of a value in global memory, or of several."""

    def __init__(self, values: Tensor, place: int | Tensor = 0) -> None:
        self.values, self.place = values, place

    def __add__(self, offset: int | Tensor) -> "Pointer":
        return Pointer(self.values, self.place + offset)

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        """To numbers of another type, that are as wide or wider."""
        assert bitcast
        ratio = dtype.itemsize // self.values.element_size()
        assert isinstance(self.place, Tensor)
        assert not (self.place % ratio).any()
        return Pointer(self.values.view(dtype), self.place // ratio)

    def __getitem__(self, axes: Any) -> "Pointer":
        assert isinstance(self.place, Tensor)
        return Pointer(self.values, self.place[axes])

    def load(self, mask: Tensor | None, other: int) -> Any:
        if not isinstance(self.place, Tensor):
            found = self.values[self.place]
            return found if found.is_floating_point() else Number(found)
        if mask is None:
            assert int(self.place.min()) >= 0, "a load before its tensor"
            return self.values[self.place]
        mask = mask.broadcast_to(self.place.shape)
        assert not mask.any() or int(self.place[mask].max()) < self.values.numel(), "a load past its tensor"
        return torch.where(mask, self.values[torch.where(mask, self.place, 0)], other)

    def store(self, value: Any, mask: Tensor | None = None) -> None:
        if mask is None:
            self.values[self.place] = value
        else:
            assert isinstance(self.place, Tensor)
            self.values[self.place[mask]] = value[mask]

    def add(self, number: int) -> int:
        """What was there before."""
        found = int(self.values[self.place])
        self.values[self.place] += number
        return found


def _scalars(function: Callable[..., Any], *arguments: Any) -> Any:
    found = function(*arguments)
    return tuple(map(Number, found)) if isinstance(found, tuple) else found


def _pointer(tensor: Tensor) -> Pointer:
    """To a tensor's first value, among all that its memory holds: strides count from there."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return Pointer(torch.as_strided(tensor, (count,), (1,), 0), tensor.storage_offset())


class Number(int):
    """A scalar of a kernel."""

    def to(self, _dtype: object) -> "Number":
        return self

    def __floordiv__(self, other: int) -> "Number":
        return Number(int(self) // other)

    def __mod__(self, other: int) -> "Number":
        return Number(int(self) % other)


FAR = 2**30  # where the rows of a sequence end for descriptors of packed sequences


def _rows_of_sequence(desc: Any, start: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
    """`_window` of a descriptor whose first two strides bring (FAR, end, head, FAR - length + row, column) to a row."""
    far, end, head, place, column = start
    assert far == FAR, "the first coordinate must take away what the others add"
    assert (FAR * (desc.strides[0] + desc.strides[3]) * desc.base.element_size()) % 2**64 == 0
    first, size = end + place - FAR, desc.block_shape[3]
    low, high = min(max(first, 0), end), max(0, min(first + size, end))
    if first < 0 and low < high:
        raise EmulatorError("a block starts before its tensor")
    width = min(desc.block_shape[4], desc.shape[4] - column)
    total = desc.base.shape[0 if desc.base.ndim == 3 else 2]  # a call's own tensors are (total, heads, columns)
    whole = torch.as_strided(desc.base, (desc.shape[2], total, desc.shape[4]), desc.strides[2:])
    rows = whole[head, low:high, column : column + width][None, None, None]
    one = slice(0, 1)
    return rows, (one, one, one, slice(low - first, high - first), slice(0, width))


def _window(desc: Any, start: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
    """The part of a descriptor's tensor that a block at `start` covers, and which part of the block that is."""
    if len(desc.shape) == 5:
        return _rows_of_sequence(desc, start)
    # One that has no end takes all that there is: what a block covers beyond it would be an error.
    shape = [
        desc.base.numel() // stride if length > FAR else length
        for length, stride in zip(desc.shape, desc.strides, strict=True)
    ]
    whole = torch.as_strided(desc.base, shape, desc.strides)
    inside, covered = [], []
    for first, size, length, has_end in zip(
        start, desc.block_shape, shape, (length <= FAR for length in desc.shape), strict=True
    ):
        if not has_end and not 0 <= first <= length - size:
            raise EmulatorError("a block lies outside of a workspace")
        low, high = min(max(first, 0), length), min(max(first + size, 0), length)
        inside.append(slice(low, high))
        covered.append(slice(low - first, high - first))
    return whole[tuple(inside)], tuple(covered)


class Emulator:
    """A module's kernel, called as `loaded.LoadedKernel` is; every launch takes another seed."""

    def __init__(self, module: ModuleType, *, seed: int = 0, num_sms: int = 3) -> None:
        self.module, self.seed, self.num_sms = module, seed, num_sms
        self.is_forward = module.KERNEL.fn.__name__ == "attention_fwd"

    def __call__(self, q: Tensor, k: Tensor, *others: Any) -> None:
        scratch = torch.zeros(getattr(self.module, "SCRATCH_INTS", 0), dtype=torch.int32)
        given = (q, k, *others, scratch) if scratch.numel() else (q, k, *others)
        arguments = self.module.arguments(*given)
        self.launch(self._programs(q, k, arguments, is_counted=bool(scratch.numel())), arguments)
        if scratch.any():
            raise EmulatorError("the tile counter was left at another value than 0")

    def launch(self, programs: int, values: Sequence[Any]) -> None:
        """Run so many programs on a kernel's arguments."""
        arguments = [_pointer(one) if isinstance(one, Tensor) else one for one in values]
        machine = Machine(self.seed, self.num_sms)
        names = _names(self.module, machine)
        names["gl"].num_programs = lambda _axis: programs
        kernel = names[self.module.KERNEL.fn.__name__]
        self.seed += 1

        def start(program: int) -> list[Agent]:
            if self.is_forward and "producer" not in names:
                return [Agent(program, "the program", partial(kernel, *arguments))]
            partitions: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
            names["gl"].warp_specialize = lambda parts, _warps, _registers: partitions.extend(parts)
            _running.agent = Agent(program, "all warps", lambda: None)  # what the kernel finds for its partitions
            kernel(*arguments)
            return [Agent(program, work.__name__, partial(work, *given)) for work, given in partitions]

        machine.run(start, programs)

    def _programs(self, q: Tensor, k: Tensor, arguments: Sequence[Any], *, is_counted: bool) -> int:
        owner = q if self.is_forward else k
        sizes = list(owner.shape[:3])
        names = list(self.module.SIGNATURE)
        if "num_sequences" in names:
            sizes[0] = arguments[names.index("num_sequences")]
        return int(self.module.grid(*sizes, self.num_sms)[0] if is_counted else self.module.grid(*sizes)[0])


def _names(module: ModuleType, machine: Machine) -> dict[str, Any]:
    """What the module's functions find by their names: its numbers, the stand-ins, and each other."""
    names: dict[str, Any] = {"__builtins__": __builtins__}
    for name, value in vars(module).items():
        if type(value).__name__ == "constexpr":
            names[name] = value.value
    names.update(
        DTYPE={"bf16": torch.bfloat16, "fp16": torch.float16}[str(names["DTYPE"])],
        gl=_language(),
        mbarrier=_mbarrier(machine),
        tma=SimpleNamespace(store_wait=_wait_for_copies),
        load_tile=partial(_load, machine),
        store_tile=partial(_store, adds=False),
        add_tile=partial(_store, adds=True),
        copy_elements=_copy_elements,
        async_copy=_async_copy(machine),
        fence_async_shared=lambda: None,
        partition_barrier=lambda: None,
        warpgroup_mma=_product,
        warpgroup_mma_init=lambda accumulator: accumulator,
        warpgroup_mma_wait=partial(_wait_for_products, machine),
    )
    for name, value in vars(module).items():
        if hasattr(value, "fn") and hasattr(value.fn, "__code__"):
            names[name] = FunctionType(value.fn.__code__, names)
    if "FIRST_TURN" in names:
        names.update(_ping_pong(machine, names["CONSUMERS"]))
    else:
        names.update(_assembly(machine, names.get("MEETING_THREADS", 0)))
    if "drop" in names:
        names.update(seed_of=_halves_of_seed, drop=_drop)
    if "tanh" in names:
        names["tanh"] = torch.tanh
    if "where_shown" in names:
        names["where_shown"] = _where_shown
    if "written" in names:
        names["written"] = lambda zeros: zeros
    if "in_float32" in names:
        names["in_float32"] = lambda mask: mask.float()
    if "kept_only" in names:
        names.update(kept_only=_kept_only, uniform=lambda number: number)
    if "keep" in names:
        dtype = names["DTYPE"]
        names.update(keep=lambda p: p.to(dtype), operand=lambda p, _layout: p)
        for name in ("tile_at", "tile_of_sequence", "take_next"):
            if name in names:
                names[name] = partial(_scalars, names[name])
    return names


def _where_shown(qk: Tensor, pairs: Tensor) -> Tensor:
    """qk where the byte of a pair that belongs to a key, the upper one of odd keys, is not 0."""
    is_odd = torch.arange(qk.shape[1]) % 2 == 1
    return torch.where((torch.where(is_odd, pairs >> 8, pairs) & 0xFF) != 0, qk, -torch.inf)


def _kept_only(p: Tensor, words: Tensor, threshold: int) -> Tensor:
    """p where the half of a word that belongs to a key, the upper one of odd keys, is at least the threshold."""
    is_odd = torch.arange(p.shape[1]) % 2 == 1
    return torch.where((torch.where(is_odd, words >> 16, words) & 0xFFFF) >= threshold, p, 0.0)


def _halves_of_seed(pointer: Pointer) -> tuple[int, int]:
    seed = int(pointer.load(None, 0))
    return seed & 0xFFFFFFFF, seed >> 32


def _drop(
    p: Tensor, p_of_ds: Tensor, row: int, key: int, number: int, low: int, high: int, threshold: int
) -> tuple[Tensor, Tensor]:
    """P for dv and P for dS of keys and query rows, as `dropout` has it."""
    keys, rows = p.shape
    heads, kept_at = torch.tensor([[number]]), threshold / STEPS
    kept = kept_of(torch.tensor([high << 32 | low]), heads, range(row, row + rows), range(key, key + keys), kept_at)
    return torch.where(kept[0, 0].T, p, 0.0), torch.where(kept[0, 0].T, p_of_ds, -p_of_ds)


def _ping_pong(machine: Machine, consumers: int) -> dict[str, Callable[..., Any]]:
    """A forward's turns: named barriers of the warpgroup that gives one and the one that takes it."""
    given: dict[tuple[int, int], int] = defaultdict(int)

    def take_turn(warpgroup: int) -> None:
        place = _running.agent.program, warpgroup
        machine.wait(lambda: given[place] > 0, "its turn")
        given[place] -= 1

    def pass_turn(warpgroup: int) -> None:
        place = _running.agent.program, (warpgroup + 1) % consumers
        assert given[place] == 0, "a turn is given that was not taken before"
        given[place] += 1

    return {"take_turn": take_turn, "pass_turn": pass_turn}


def _assembly(machine: Machine, meeting_threads: int) -> dict[str, Callable[..., Any]]:
    """Functions of a module that are assembly inside."""
    meetings: dict[int, Barrier] = defaultdict(lambda: Barrier(meeting_threads // THREADS_PER_WARPGROUP))

    def meet() -> None:
        barrier = meetings[_running.agent.program]
        phase = barrier.phase
        barrier.arrive()
        machine.wait(lambda: barrier.phase != phase, "the other warpgroup")

    def read_turn(pointer: Pointer) -> int:
        agent: Agent = _running.agent
        before = agent.last_turn
        if before is not None and before[0] == pointer.place:  # it asked before: until something has changed
            machine.wait(lambda: int(pointer.values[pointer.place]) != before[1], "its turn")
        agent.last_turn = pointer.place, int(pointer.values[pointer.place])
        return agent.last_turn[1]

    def pass_turn(pointer: Pointer, change: int) -> None:
        _wait_for_copies(0)
        pointer.values[pointer.place] += change
        _running.agent.last_turn = None

    same = dict.fromkeys(("uniform", "uniform_long", "uniform_address"), lambda value: value)
    return {**same, "meet": meet, "read_turn": read_turn, "pass_turn": pass_turn}


def _language() -> SimpleNamespace:
    def where(condition: Any, one: Any, other: Any) -> Any:
        if isinstance(condition, Tensor):
            return torch.where(condition, one, other)
        return one if condition else other

    def elementwise(of_tensors: Callable[..., Tensor], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
        def apply(one: Any, other: Any) -> Any:
            if isinstance(one, Tensor) or isinstance(other, Tensor):
                return of_tensors(torch.as_tensor(one), torch.as_tensor(other))
            return Number(of_numbers(one, other))

        return apply

    def allocate(dtype: torch.dtype, shape: Sequence[int], _layout: object) -> Memory | Barriers:
        if dtype is torch.int64:
            return Barriers(shape[0])
        wrong = NAN if dtype.is_floating_point else WRONG_PAIR if dtype is torch.int16 else WRONG_NUMBER
        return Memory(torch.full(tuple(shape), wrong, dtype=dtype))

    return SimpleNamespace(
        float32=torch.float32,
        int16=torch.int16,
        int32=torch.int32,
        int64=torch.int64,
        minimum=elementwise(torch.minimum, min),
        maximum=elementwise(torch.maximum, max),
        where=where,
        abs=torch.abs,
        exp2=torch.exp2,
        log2=torch.log2,
        sum=lambda values, axis: values.sum(axis) if values.dim() > 1 else Number(values.sum(axis)),
        max=lambda values, axis: values.amax(axis) if values.dim() > 1 else int(values.amax(axis)),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        cdiv=lambda one, other: -(-one // other),
        store=lambda pointer, value, mask=None: pointer.store(value, mask),
        atomic_add=lambda pointer, number, sem: pointer.add(number),
        static_range=range,
        full=lambda shape, value, dtype, _layout: torch.full(tuple(shape), value, dtype=dtype),
        zeros=lambda shape, dtype, _layout: torch.zeros(tuple(shape), dtype=dtype),
        arange=lambda low, high, layout: torch.arange(low, high),
        join=lambda one, other: torch.stack((one, other), -1),
        reshape=lambda values, shape: values.reshape(tuple(shape)),
        permute=lambda values, order: values.permute(tuple(order)),
        convert_layout=lambda values, _layout, assert_trivial=False: values,
        SliceLayout=lambda _dim, _parent: None,
        DotOperandLayout=lambda _operand, _parent, _width: None,
        BlockedLayout=lambda *_shape: None,
        pointer_type=lambda dtype: dtype,
        SwizzledSharedLayout=lambda *_shape: None,
        program_id=lambda _axis: _running.agent.program,
        allocate_shared_memory=allocate,
    )


def _mbarrier(machine: Machine) -> SimpleNamespace:
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def wait(barrier: Barrier, phase: int) -> None:
        machine.wait(lambda: barrier.phase != phase, "a barrier")

    def arrive(barrier: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            barrier.arrive(count)
        machine.wait(lambda: True, "nothing")  # others may go on first

    def expect(barrier: Barrier, size: int, pred: bool = True) -> None:
        if pred:
            barrier.bytes += size
            barrier.left -= 1
            assert barrier.left >= 0, "more arrivals than a barrier counts"

    return SimpleNamespace(init=init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: None)


def _load(
    machine: Machine, desc: Any, start: Sequence[int], barrier: Barrier, target: Memory, pred: bool = True
) -> None:
    if not pred:
        return
    target.values.fill_(NAN)  # until it arrives, what is there may be anything

    def arrive() -> None:
        values, covered = _window(desc, start)
        target.values.zero_()
        target.values[covered] = values
        barrier.bytes -= target.values.numel() * target.values.element_size()
        assert barrier.bytes >= 0, "more bytes than were announced"
        barrier.settle()

    machine.arrivals.append(arrive)


def _copy_elements(target: Memory, source: Pointer, mask: Tensor) -> None:
    """A copy by the threads of a partition, which is there once it has waited for it."""
    values = source.load(mask, 0)
    target.values.fill_(NAN if values.is_floating_point() else WRONG_PAIR)
    _running.agent.own_copies.append(partial(target.values.copy_, values))


def _async_copy(machine: Machine) -> SimpleNamespace:
    def wait(left: int) -> None:
        machine.wait(lambda: True, "nothing")
        copies = _running.agent.own_copies
        while len(copies) > left:
            copies.pop(0)()

    return SimpleNamespace(commit_group=lambda: None, wait_group=wait)


def _store(desc: Any, start: Sequence[int], source: Memory, *, adds: bool) -> None:
    values, covered = _window(desc, start)
    found = source.values[covered]
    values.copy_(values + found if adds else found)
    _running.agent.copies.append(Copy(source.values))


def _wait_for_copies(left: int) -> None:
    copies: list[Copy] = _running.agent.copies
    while len(copies) > left:
        copies.pop(0).finish()


def _product(left: Any, right: Memory, accumulator: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(left, right, accumulator, use_acc)
    _running.agent.products.append(product)
    return product


def _wait_for_products(machine: Machine, left: int, deps: tuple[Any, ...]) -> Any:
    machine.wait(lambda: True, "nothing")  # a product takes its time, others go on
    products: list[Product] = _running.agent.products
    while len(products) > left:
        products.pop(0).finish()
    found = tuple(one.value if isinstance(one, Product) and one.value is not None else one for one in deps)
    return found if len(found) > 1 else found[0]
