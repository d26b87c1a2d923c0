"""Problems: keys, the short text form, and what is counted from them."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.errors import InvalidProblemError
from fa_autotune.problem.family import FEATURE_WORDS, Access
from fa_autotune.problem.passes import BACKWARD_PASSES, FUSED_BACKWARD, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from kit.strategies import json_values, problems

LLAMA = AttentionProblem.parse("4x32x8x4096x4096x128,causal")


@given(problems())
def test_a_problem_survives_its_key(problem: AttentionProblem) -> None:
    assert AttentionProblem.from_key(problem.key) == problem


@given(problems(), problems())
def test_keys_are_equal_exactly_where_problems_are(one: AttentionProblem, other: AttentionProblem) -> None:
    assert (one.key == other.key) == (one == other)


def test_the_key_is_this_text_for_ever() -> None:
    assert LLAMA.key == (
        '{"access":"tma","batch_size":4,"bounded_right":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":128,'
        '"num_kv_heads":8,"num_q_heads":32,"pass":"fwd","schema":1,"seqlen_k":4096,"seqlen_q":4096}'
    )


def test_an_order_is_named_where_it_is_missing() -> None:
    fused = LLAMA.for_pass(Pass.BWD_FUSED)
    assert "unordered" not in fused.key
    assert '"unordered":true' in LLAMA.for_pass(Pass.BWD_FUSED, unordered=True).key
    with pytest.raises(InvalidProblemError, match="unordered=True is for bwd_fused"):
        LLAMA.for_pass(Pass.BWD_DQ, unordered=True)
    with pytest.raises(InvalidProblemError, match="missing or unknown entries: unordered"):
        AttentionProblem.from_key(fused.key.replace('"seqlen_q"', '"unordered":false,"seqlen_q"'))


@given(problems())
def test_parse_reads_keys_too(problem: AttentionProblem) -> None:
    assert AttentionProblem.parse(problem.key) == problem


@given(problems())
def test_parse_reads_the_labels_that_tables_show(problem: AttentionProblem) -> None:
    assert AttentionProblem.parse(problem.label) == problem


@pytest.mark.parametrize(
    ("text", "label", "added"),
    [
        (
            "causal,left=4095",
            "fwd bf16 d64 window 1×2×2×8×9 left=4095",
            '"bounded_left":true',
        ),
        ("left=3", "fwd bf16 d64 left 1×2×2×8×9 left=3", '"window_left":3'),
        ("right=2", "fwd bf16 d64 causal 1×2×2×8×9 right=2", '"window_right":2'),
        ("left=0,right=0", "fwd bf16 d64 window 1×2×2×8×9", '"bounded_left":true'),
        ("left=5,right=1", "fwd bf16 d64 window 1×2×2×8×9 left=5 right=1", '"window_right":1'),
        ("sinks,alibi", "fwd bf16 d64 full alibi sinks 1×2×2×8×9", '"alibi":true'),
        ("softcap,causal,left=5", "fwd bf16 d64 window softcap 1×2×2×8×9 left=5", '"softcap":true'),
    ],
)
def test_features_are_named_in_labels_and_keys(text: str, label: str, added: str) -> None:
    problem = AttentionProblem.parse(f"1x2x2x8x9x64,{text}")
    assert problem.label == label
    assert added in problem.key


def test_what_is_off_leaves_nothing_in_a_key() -> None:
    """Keys of problems without a window are those of releases that knew none."""
    assert AttentionProblem.parse("1x2x2x8x9x64,causal") == AttentionProblem.parse("1x2x2x8x9x64,right=0")
    assert not any(word in LLAMA.key for word in ("left", "window", "softcap", "alibi", "sinks"))


@pytest.mark.parametrize(
    "text",
    [
        "fwd bf16 d64 full 1×2×2×8×9 left=3",
        "fwd bf16 d64 causal 1×2×2×8×9 left=3",
        "fwd bf16 d64 left 1×2×2×8×9 right=3",
    ],
)
def test_a_label_whose_word_denies_its_window_is_refused(text: str) -> None:
    with pytest.raises(InvalidProblemError, match="mask has no"):
        AttentionProblem.parse(text)


@pytest.mark.parametrize("entry", ['"bounded_left":false', '"window_left":0', '"window_left":true', '"window_left":-1'])
def test_a_key_that_spells_out_what_is_off_is_refused(entry: str) -> None:
    """One problem has one key."""
    key = AttentionProblem.parse("1x2x2x8x9x64,left=3").key
    spelled = key.replace('"bounded_left":true' if "bounded" in entry else '"window_left":3', entry)
    with pytest.raises(InvalidProblemError, match="missing or unknown entries"):
        AttentionProblem.from_key(spelled)


def test_sinks_are_the_forwards_alone() -> None:
    """A backward's kernels find them in lse, and are those of calls without sinks."""
    problem = AttentionProblem.parse("1x2x2x8x9x64,sinks")
    for kernel_pass in BACKWARD_PASSES:
        assert problem.for_pass(kernel_pass) == AttentionProblem.parse("1x2x2x8x9x64").for_pass(kernel_pass)
    with pytest.raises(InvalidProblemError, match=r"sinks=True is for fwd: bwd_dq finds the sinks in lse"):
        replace(problem.family, kernel_pass=Pass.BWD_DQ)


def test_a_window_on_a_side_that_is_open_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match=r"window_left=3 .* bounded_left is False; .* left=3"):
        AttentionProblem(family=LLAMA.family, shape=replace(LLAMA.shape, window_left=3))


def test_flops_of_a_window_are_those_of_its_pairs() -> None:
    problem = AttentionProblem.parse("1x1x1x100x100x64,causal,left=9")
    assert problem.flops == 4 * 64 * (100 * 10 - 45)


def test_a_label_of_an_unknown_pass_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="pass='sideways' is not one of: fwd"):
        AttentionProblem.parse("sideways bf16 d128 causal 4×32×8×4096×4096")


@given(problems())
def test_the_short_form_names_every_problem(problem: AttentionProblem) -> None:
    family = problem.family
    shape = problem.shape
    sizes = f"{shape.batch_size}x{shape.num_q_heads}x{shape.num_kv_heads}x{shape.seqlen_q}x{shape.seqlen_k}"
    text = f"{sizes}x{family.head_dim}x{family.head_dim_v}"
    text += f", left={shape.window_left}" if family.bounded_left else ""
    text += f", right={shape.window_right}" if family.bounded_right else ""
    text += f", {family.dtype.value}, {family.access.value}, {family.kernel_pass}"
    text += "".join(f", {word}" for word in FEATURE_WORDS if getattr(family, word))
    assert AttentionProblem.parse(text) == problem


@pytest.mark.parametrize(
    "text", ["4x32x8x4096x4096x128,causal", "4×32×8×4096×4096×128,CAUSAL", " 4x32x8x4096x4096x128 , bf16,causal,tma"]
)
def test_spellings_of_one_problem_are_equal(text: str) -> None:
    assert AttentionProblem.parse(text) == LLAMA


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "BxHqxHkvxLqxLkxD"),
        ("4x32x8x4096x4096", "BxHqxHkvxLqxLkxD"),
        ("4x32x8x4096x4096x128x128x1", "BxHqxHkvxLqxLkxD"),
        ("4x32x8x4096x4096x\u0661\u0662\u0668", "BxHqxHkvxLqxLkxD"),
        ("4x32x8x4096x" + "9" * 5000 + "x128", "BxHqxHkvxLqxLkxD"),
        ("4x32x8x4096x4096x128,causual", "'causual'"),
        ("4x32x8x4096x4096x128,causal,right=5", "in two ways which keys a row sees"),
        ("4x32x8x4096x4096x128,left=3,left=4", "in two ways"),
        ("4x32x8x4096x4096x128,left=3,full", "full bounds no side"),
        ("4x32x8x4096x4096x513", "head_dim=513 is not an integer from 8 to 512"),
        ("4x32x8x4096x4096x4", "head_dim=4 is not an integer from 8 to 512"),
        ("0x32x8x4096x4096x128", "batch_size=0"),
        ("4x32x5x4096x4096x128", "num_q_heads=32 is no multiple of num_kv_heads=5"),
        ("65536x65536x1x1x1x64", "split the batch"),
        ("4x32x8x4096x4096x100,bf16,tma", "say access=any"),
    ],
)  # fmt: skip
def test_a_wrong_short_form_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InvalidProblemError, match=says):
        AttentionProblem.parse(text)


@given(st.text() | json_values().map(json.dumps))
def test_no_text_raises_anything_but_our_error(text: str) -> None:
    with suppress(InvalidProblemError):
        AttentionProblem.parse(text)


@given(st.sampled_from(sorted(json.loads(LLAMA.key))), json_values())
def test_a_key_with_a_foreign_value_is_refused_or_means_what_it_says(name: str, value: object) -> None:
    values = {**json.loads(LLAMA.key), name: value}
    try:
        parsed = AttentionProblem.from_key(json.dumps(values))
    except InvalidProblemError:
        return
    assert json.loads(parsed.key) == values
    assert type(json.loads(parsed.key)[name]) is type(value)


@pytest.mark.parametrize("change", [{"schema": 2}, {"schema": True}, {"softcap": 1.0}])
def test_a_key_of_another_schema_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidProblemError, match=r"schema|softcap"):
        AttentionProblem.from_key(json.dumps({**json.loads(LLAMA.key), **change}))


def test_a_key_with_a_missing_entry_names_it() -> None:
    values = json.loads(LLAMA.key)
    del values["seqlen_q"]
    with pytest.raises(InvalidProblemError, match="seqlen_q"):
        AttentionProblem.from_key(json.dumps(values))


def test_a_problem_of_plain_values_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match=r"AttentionProblem\.parse"):
        AttentionProblem(family="fwd", shape=LLAMA.shape)


@given(problems(max_seqlen=24))
def test_visible_pairs_are_those_of_the_mask(problem: AttentionProblem) -> None:
    seqlen_q, seqlen_k = problem.shape.seqlen_q, problem.shape.seqlen_k
    offset, family = seqlen_k - seqlen_q, problem.family
    last = offset + problem.shape.window_right if family.bounded_right else seqlen_k
    first = offset - problem.shape.window_left if family.bounded_left else -seqlen_q
    pairs = sum(i + first <= j <= i + last for i in range(seqlen_q) for j in range(seqlen_k))
    assert problem.visible_pairs == pairs


def test_the_split_backward_computes_seven_products_where_the_forward_has_two() -> None:
    assert sum(LLAMA.for_pass(kernel_pass).flops for kernel_pass in SPLIT_BACKWARD) == 7 * LLAMA.flops // 2
    assert sum(LLAMA.for_pass(kernel_pass).flops for kernel_pass in FUSED_BACKWARD) == 5 * LLAMA.flops // 2


@pytest.mark.parametrize(
    ("kernel_pass", "columns"),
    [
        (Pass.FWD, 64 + 32),
        (Pass.BWD_DELTA, 0),
        (Pass.BWD_DKDV, 192),
        (Pass.BWD_DQ, 160),
        (Pass.BWD_FUSED, 3 * 64 + 2 * 32),
    ],
)
def test_flops_count_each_product_by_the_columns_that_it_sums_or_gives(kernel_pass: Pass, columns: int) -> None:
    problem = AttentionProblem.parse("2x4x2x10x20x64x32")
    assert problem.for_pass(kernel_pass).flops == 2 * (2 * 4 * 10 * 20) * columns


def test_a_pass_without_products_has_no_tflops() -> None:
    assert LLAMA.tflops(1.0) == LLAMA.flops / 1e9
    assert LLAMA.for_pass(Pass.BWD_DELTA).tflops(1.0) is None


def test_a_square_causal_problem_counts_half_of_the_full_flops() -> None:
    full = AttentionProblem.parse("4x32x8x4096x4096x128")
    assert (full.flops, LLAMA.flops) == (4 * 4 * 32 * 4096 * 4096 * 128, 2 * 4 * 32 * 4096 * 4096 * 128)


def test_io_bytes_count_each_tensor_once() -> None:
    problem = AttentionProblem.parse("1x4x2x10x20x64x32,fp16")
    q, k, v, out, lse = 4 * 10 * 64 * 2, 2 * 20 * 64 * 2, 2 * 20 * 32 * 2, 4 * 10 * 32 * 2, 4 * 10 * 4
    assert problem.io_bytes == q + k + v + out + lse


@pytest.mark.parametrize(
    ("kernel_pass", "expected"),
    [
        (Pass.BWD_DELTA, 2 * 4 * 10 * 32 * 2 + 4 * 10 * 4),  # out, do; delta
        (Pass.BWD_DKDV, (4 * 10 * 96 + 2 * 20 * 96 + 2 * 20 * 96) * 2 + 2 * 4 * 10 * 4),  # q do, k v, dk dv; lse delta
        (Pass.BWD_DQ, (4 * 10 * 96 + 2 * 20 * 96 + 4 * 10 * 64) * 2 + 2 * 4 * 10 * 4),  # q do, k v, dq; lse delta
    ],
)
def test_io_bytes_of_a_backward_count_what_it_reads_and_writes(kernel_pass: Pass, expected: int) -> None:
    assert AttentionProblem.parse("1x4x2x10x20x64x32,fp16").for_pass(kernel_pass).io_bytes == expected


# --- passes -----------------------------------------------------------------------------------------------------------


@given(problems())
def test_a_problem_is_its_own_for_its_pass(problem: AttentionProblem) -> None:
    of_pass = {name: getattr(problem.family, name) for name in ("unordered", "mask_gradient")}
    assert problem.for_pass(problem.family.kernel_pass, **of_pass) == problem


@pytest.mark.parametrize("kernel_pass", [Pass.BWD_DKDV, Pass.BWD_DQ])
def test_a_gradients_problem_is_the_forwards_but_for_the_pass(kernel_pass: Pass) -> None:
    problem = LLAMA.for_pass(kernel_pass)
    assert problem.family.kernel_pass is kernel_pass
    assert problem.for_pass(Pass.FWD) == LLAMA


def test_delta_knows_neither_keys_nor_a_mask() -> None:
    one, other = map(AttentionProblem.parse, ("2x8x2x100x300x192x128,causal", "2x8x8x100x100x128"))
    assert one.for_pass(Pass.BWD_DELTA) == other.for_pass(Pass.BWD_DELTA)


def test_delta_has_no_problem_of_another_pass() -> None:
    with pytest.raises(InvalidProblemError, match="start from the forward's"):
        LLAMA.for_pass(Pass.BWD_DELTA).for_pass(Pass.FWD)


@pytest.mark.parametrize("kernel_pass", BACKWARD_PASSES)
def test_shapes_of_one_family_share_that_of_a_pass(kernel_pass: Pass) -> None:
    other = AttentionProblem.parse("1x8x8x100x200x128,causal")
    assert other.for_pass(kernel_pass).family is LLAMA.for_pass(kernel_pass).family


@pytest.mark.parametrize(
    ("text", "access"),
    [("1x2x2x8x8x59x64", Access.TMA), ("1x2x2x8x8x64x59", Access.ANY), ("1x2x2x8x8x64,any", Access.ANY)],
)
def test_the_access_of_delta_is_that_of_its_own_rows(text: str, access: Access) -> None:
    assert AttentionProblem.parse(text).for_pass(Pass.BWD_DELTA).family.access is access


def test_labels_name_what_is_unusual() -> None:
    assert LLAMA.label == "fwd bf16 d128 causal 4×32×8×4096×4096"
    assert AttentionProblem.parse("1x2x2x8x8x100x36,fp32").label == "fwd fp32 d100/36 full 1×2×2×8×8"
    assert AttentionProblem.parse("1x2x2x8x8x64,aligned").family.label == "fwd bf16 d64 full aligned"
    assert AttentionProblem.parse("1x2x2x8x8x64,causal,bwd_dq").family.label == "bwd_dq bf16 d64 causal"


def test_group_size_counts_query_heads_per_kv_head() -> None:
    shape = AttentionShape(batch_size=1, num_q_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=1)
    assert shape.gqa_group_size == 4


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("1x2x2x1x80x64,causal", "1x2x2x1x80x64"),
        ("1x2x2x1x80x64,causal,bwd_dq", "1x2x2x1x80x64,bwd_dq"),
        ("1x2x2x2x80x64,causal", "1x2x2x2x80x64,causal"),
        ("1x2x2x1x80x64", "1x2x2x1x80x64"),
        ("1x2x2x1x80x64,causal,left=16", "1x2x2x1x80x64,left=16"),
        ("1x2x2x9x80x64,causal,left=79", "1x2x2x9x80x64,causal"),
        ("1x2x2x9x80x64,causal,left=78", "1x2x2x9x80x64,causal,left=78"),
        ("1x2x2x9x80x64,left=3,right=8", "1x2x2x9x80x64,left=3"),
        ("1x2x2x9x80x64,left=3,right=7", "1x2x2x9x80x64,left=3,right=7"),
    ],
)
def test_a_bound_that_hides_nothing_is_not_called_for(text: str, called: str) -> None:
    assert AttentionProblem.parse(text).as_called() == AttentionProblem.parse(called)


def test_varlen_is_in_a_key_only_where_it_is_on() -> None:
    problem = AttentionProblem.parse("8x32x8x2048x2048x128,causal,varlen")
    assert problem.family.varlen
    assert problem.label == "fwd bf16 d128 causal varlen 8×32×8×2048×2048"
    assert AttentionProblem.parse(problem.label) == problem == AttentionProblem.from_key(problem.key)
    padded = AttentionProblem.parse("8x32x8x2048x2048x128,causal")
    assert "varlen" not in padded.key
    assert padded.key != problem.key


def test_delta_goes_over_all_rows_whatever_their_sequence() -> None:
    delta = AttentionProblem.parse("8x32x8x2048x1024x128,causal,varlen").for_pass(Pass.BWD_DELTA)
    assert delta == AttentionProblem.parse("1x32x8x16384x16384x128").for_pass(Pass.BWD_DELTA)
    with pytest.raises(InvalidProblemError, match="varlen=True is for passes that know sequences: bwd_delta goes over"):
        replace(delta.family, varlen=True)


def test_a_called_problem_is_rounded_to_powers_of_two_and_keeps_its_bounds() -> None:
    called = AttentionProblem.parse("6x4x4x1x1000x64,causal,left=5000,varlen").as_called()
    assert called == AttentionProblem.parse("8x4x4x1x1024x64,causal,left=5000,varlen")


def test_postprocessings_of_capped_calls_are_those_of_uncapped_ones() -> None:
    call = AttentionProblem.parse("1x2x1x64x64x64,causal,left=3,softcap,alibi")
    plain = AttentionProblem.parse("1x2x1x64x64x64,causal,left=3")
    assert call.for_pass(Pass.BWD_POSTPROCESS) == plain.for_pass(Pass.BWD_POSTPROCESS)


@pytest.mark.parametrize("text", [None, 5, b"1x2x2x64x64x64"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidProblemError, match="is no text of a problem; write it as 4x32x8"):
        AttentionProblem.parse(text)


def test_problems_may_be_one_or_several_and_texts_or_themselves() -> None:
    text = "1x2x2x64x64x64"
    problem = AttentionProblem.parse(text)
    for asked in (text, problem, [text], [problem], iter([text])):
        assert AttentionProblem.several(asked) == [problem]
    with pytest.raises(InvalidProblemError, match="problem=5 is a int, and no problem; write it as"):
        AttentionProblem.several([5])
    with pytest.raises(InvalidProblemError, match="problems=5 is no list of problems; write it as"):
        AttentionProblem.several(5)
