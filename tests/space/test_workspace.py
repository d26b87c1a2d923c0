"""The memory that the kernels of the fused backward hand to each other: sizes, and the order of registers."""

from dataclasses import replace

from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.workspace import (
    dq_acc_size,
    dq_padding,
    packed_dq_acc_size,
    packed_turns_size,
)


def test_workspaces_have_room_for_every_sequence_and_one_more() -> None:
    call = AttentionProblem.parse("8x4x2x1024x1024x64,varlen")
    padded = replace(call, family=replace(call.family, varlen=False))
    assert packed_turns_size(4, 8, 8 * 1024) == (4, (64 + 8 + 1) * 2)
    assert packed_dq_acc_size(call.family, 4, 8, 8192)[0] == 4 * (64 + 9) * (128 * 64 // 256)
    assert dq_padding(call.family, call.shape) == 73 / 64
    assert dq_padding(padded.family, padded.shape) == 1.0
    assert dq_acc_size(padded.family, padded.shape)[0] == 4 * 64 * 32
