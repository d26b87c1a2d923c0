"""What a schedule of the warp-specialised forward consists of: its parts are there, and those of the others are not."""

import ast
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.kernels.render import render
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import HopperWsFwdConfig, Schedule
from fa_autotune.space.estimates import BARRIER_BYTES, hopper_smem_bytes
from kit.strategies import head_dims

COUNTED = (Schedule.PERSISTENT, Schedule.PIPELINED)
PRODUCED = (Schedule.TILE, *COUNTED)
MAX_COLUMNS = 120


def make_candidate(
    schedule: Schedule = Schedule.TILE,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    **knobs: int | bool,
) -> Candidate:
    family = AttentionFamily(
        dtype=DType.BFLOAT16,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        bounded_right=causal,
        access=Access.TMA,
    )
    shared = {"CONSUMERS": 1 if schedule is Schedule.SINGLE else 2, "BLOCK_N": 64, **knobs}
    return Candidate(
        family=family,
        variant=Variant.HOPPER_WS,
        config=HopperWsFwdConfig(SCHEDULE=schedule, **shared),  # type: ignore[arg-type]
    )


def body(candidate: Candidate) -> str:
    """A render without its comments, docstrings and header."""
    tree = ast.parse(render(candidate).text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(tree)


def functions(candidate: Candidate) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(body(candidate)).body if isinstance(node, ast.FunctionDef)}


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function in a piece of code, by its last name."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    return [one for one in found if ast.unparse(one.func).split(".")[-1] == name]


# What belongs to some schedules only: pattern → those schedules.
PARTS = {
    r"gl\.warp_specialize": PRODUCED,
    r"def producer\b": PRODUCED,
    r"def consumer\b": PRODUCED,
    r"\bCONSUMERS\b": PRODUCED,
    r"\bemptied\b": PRODUCED,
    r"def load_item\b": (Schedule.SINGLE,),
    r"while \w+ < num_tiles": COUNTED,
    r"\bq_emptied\b": COUNTED,
    r"gl\.atomic_add": COUNTED,
    r"\bscratch": COUNTED,
    r"\bSCRATCH_INTS\b": COUNTED,
    r"\bnum_sms\b": COUNTED,
    r"\bannounce_next\b": COUNTED,
    r"\bQ_BUFFERS\b": (Schedule.PIPELINED,),
    r"\bp_next\b": (Schedule.PIPELINED,),
    r"\bleft_row\b": (Schedule.PIPELINED,),
    r"\bout_tile_0 = gl\.allocate_shared_memory": (Schedule.PIPELINED,),  # the others have the query rows' buffer
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("schedule", Schedule)
def test_a_schedule_has_its_own_parts_and_no_others(schedule: Schedule, causal: bool) -> None:
    text = body(make_candidate(schedule, causal=causal))
    assert {part for part in PARTS if re.search(part, text)} == {
        part for part, schedules in PARTS.items() if schedule in schedules
    }


@pytest.mark.parametrize("schedule", Schedule)
def test_a_full_kernel_knows_no_diagonal(schedule: Schedule) -> None:
    candidate = make_candidate(schedule)
    names = {name: ast.unparse(node) for name, node in functions(candidate).items() if name not in {"launch"}}
    names["arguments"] = names["arguments"].split("\n", 1)[1]  # it takes one all the same, as all modules do
    assert not re.search(r"diagonal|last_key|unmasked|MASKED|m_safe|key_range", "\n".join(names.values()))


@pytest.mark.parametrize("schedule", Schedule)
def test_an_exact_full_kernel_masks_nothing(schedule: Schedule) -> None:
    ragged, exact = (body(make_candidate(schedule, EXACT_LENGTHS=value)) for value in (False, True))
    pattern = r"def masked|masked\(|mask="
    assert re.search(pattern, ragged)
    assert not re.search(pattern, exact)


@pytest.mark.parametrize("schedule", Schedule)
def test_a_causal_kernel_masks_its_first_block_and_one_of_two_loops(schedule: Schedule) -> None:
    made = functions(make_candidate(schedule, causal=True))
    flags = [ast.unparse(call.args[-1]) for call in calls(made["attend_rest"], "attend")]
    assert flags == ["True", "False"]
    assert len(calls(made["begin"], "masked")) == 1


@pytest.mark.parametrize("schedule", PRODUCED)
@pytest.mark.parametrize("consumers", [2, 3])
def test_each_consumer_is_a_partition_and_all_registers_are_given_away(schedule: Schedule, consumers: int) -> None:
    candidate = make_candidate(schedule, 64, CONSUMERS=consumers)
    numbers = constants(body(candidate))
    (call,) = calls(functions(candidate)["attention_fwd"], "warp_specialize")
    partitions, warps, registers = call.args
    assert isinstance(partitions, ast.List)
    names = [ast.unparse(one.elts[0]) for one in partitions.elts if isinstance(one, ast.Tuple)]
    assert names == ["consumer"] * consumers + ["producer"]
    assert isinstance(registers, ast.List)
    register_counts = [numbers[ast.unparse(one)] for one in registers.elts]
    assert ast.literal_eval(warps) == [4] * (consumers - 1) + [1]
    # Triton fills up to whole warpgroups, and gives the first partition what is left: as many as the others have.
    whole = 65536 // (128 * (consumers + 1)) // 8 * 8 * (consumers + 1)
    assert whole - sum(register_counts) >= register_counts[0]


@pytest.mark.parametrize("schedule", PRODUCED)
def test_turns_are_taken_and_passed_in_pairs(schedule: Schedule) -> None:
    with_turns, without = (functions(make_candidate(schedule, PING_PONG=value)) for value in (True, False))
    taken, passed = ([len(calls(node, name)) for node in with_turns.values()] for name in ("take_turn", "pass_turn"))
    assert taken == passed
    assert sum(taken) >= 3
    assert not any(calls(node, "take_turn") for node in without.values())
    assert "TURN" not in body(make_candidate(schedule))


def test_packed_probabilities_are_converted_by_hand_and_others_not() -> None:
    packed, unpacked = (body(make_candidate(PACK_P=value)) for value in (True, False))
    assert ("cvt.rn.bf16x2" in packed, "cvt.rn.bf16x2" in unpacked) == (True, False)


@pytest.mark.parametrize(
    ("schedule", "dims", "own"),
    [
        (Schedule.TILE, (128, 128), False),
        (Schedule.TILE, (192, 128), False),  # its first piece is as wide as O
        (Schedule.TILE, (128, 192), True),
        (Schedule.PERSISTENT, (96, 64), False),
        (Schedule.PERSISTENT, (64, 96), True),
        (Schedule.PIPELINED, (128, 128), True),
    ],
)
def test_o_leaves_through_the_query_rows_where_these_are_done_with_and_as_wide(
    schedule: Schedule, dims: tuple[int, int], own: bool
) -> None:
    candidate = make_candidate(schedule, *dims)
    assert bool(re.search(r"out_tile_0 = gl\.allocate", body(candidate))) is own


@pytest.mark.parametrize("schedule", COUNTED)
def test_rows_that_become_an_output_are_given_back_after_their_copy_has_left(schedule: Schedule) -> None:
    """Else the next tile's query rows would overwrite an output that is still being read."""
    consumer = functions(make_candidate(schedule, EXACT_LENGTHS=True))["consumer"]
    (loop,) = (node for node in ast.walk(consumer) if isinstance(node, ast.While))
    lines = [ast.unparse(line) for line in loop.body]
    released = next(place for place, line in enumerate(lines) if "q_emptied" in line)
    written = next(place for place, line in enumerate(lines) if line.startswith("write_out("))
    if schedule is Schedule.PIPELINED:  # O has a buffer of its own
        assert released < written
    else:
        assert lines[written + 1 : released + 1][0] == "tma.store_wait(0)"


def test_every_kernel_waits_for_its_last_copy_and_shows_its_barriers_to_the_loads() -> None:
    for schedule in Schedule:
        made = functions(make_candidate(schedule))
        last = ast.unparse(made["attention_fwd" if schedule is Schedule.SINGLE else "consumer"].body[-1])
        assert last == "tma.store_wait(0)"
        lines = [ast.unparse(line) for line in made["attention_fwd"].body]
        fence = lines.index("fence_async_shared()")
        assert all("mbarrier.init" not in line for line in lines[fence:])


@st.composite
def hopper_candidates(draw: st.DrawFn) -> Candidate:
    schedule = draw(st.sampled_from(Schedule))
    single = schedule is Schedule.SINGLE
    candidate = make_candidate(
        schedule,
        draw(head_dims(256).filter(lambda dim: dim % 8 == 0)),
        draw(head_dims(256).filter(lambda dim: dim % 8 == 0)),
        causal=draw(st.booleans()),
        CONSUMERS=1 if single else draw(st.sampled_from([2, 3])),
        BLOCK_N=draw(st.sampled_from([64, 128])),
        num_stages=draw(st.sampled_from([2, 3, 4])),
        PING_PONG=not single and draw(st.booleans()),
        PACK_P=draw(st.booleans()),
        EXACT_LENGTHS=draw(st.booleans()),
        OWN_OUT=draw(st.booleans()) and schedule is Schedule.PERSISTENT,
    )
    return replace(
        candidate, family=replace(candidate.family, dtype=draw(st.sampled_from([DType.FLOAT16, DType.BFLOAT16])))
    )


@given(hopper_candidates())
def test_no_line_is_too_long_to_read(candidate: Candidate) -> None:
    lines = render(candidate).text.splitlines()[4:]
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


def constants(text: str) -> dict[str, int]:
    found = re.findall(r"^([A-Z_]+) = gl\.constexpr\((\d+)\)", text, re.MULTILINE)
    return {name: int(value) for name, value in found}


@given(hopper_candidates())
def test_the_constraints_count_the_shared_memory_that_a_kernel_allocates(candidate: Candidate) -> None:
    text = body(candidate)
    names = {"CONSUMERS": 1, **constants(text)}
    total = 0
    for shape in re.findall(r"gl\.allocate_shared_memory\(DTYPE, \[(.*?)\]", text):
        sizes = [eval(size, {}, names) for size in shape.split(", ")]
        total += sizes[0] * sizes[3] * sizes[4] * 2
    barriers = 0
    for shape in re.findall(r"gl\.allocate_shared_memory\(gl\.int\d\d, \[(.*?)\]", text):
        barriers += 8 * eval(shape.split(", ")[0], {}, names)
    assert total == hopper_smem_bytes(candidate.family, candidate.config) - BARRIER_BYTES  # type: ignore[arg-type]
    assert barriers <= BARRIER_BYTES / 2  # each piece is aligned
