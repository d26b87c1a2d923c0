"""How many modules a value meets on its way from a call to the launch: few, for a reader who follows it."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen
from kit.attention_calls import make_small, runs_kernels


def modules_met(call: Callable[[], Any], is_it: Callable[[Any], bool]) -> list[str]:
    """The modules of ours, in order, whose functions are given a value, or something that holds it."""
    met: dict[str, None] = {}

    def holds(value: Any) -> bool:
        return is_it(value) or (isinstance(value, (tuple, list)) and any(map(holds, value)))

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("fa_autotune.") and any(map(holds, list(frame.f_locals.values()))):
            met[name] = None

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(met)


def is_part_of(tensor: Tensor) -> Callable[[Any], bool]:
    """Whether a value is that tensor, or a view of it."""
    address = tensor.untyped_storage().data_ptr()

    def is_it(value: Any) -> bool:
        return isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == address

    return is_it


@runs_kernels
def test_q_meets_twelve_modules_at_most(cold: None) -> None:
    q, k, v = make_small()
    met = modules_met(lambda: attention(q, k, v, causal=True), is_part_of(q))
    assert met[0] == "fa_autotune.ops.api"
    assert "fa_autotune.kernels.fast_launch" in met
    assert len(met) <= 12, met


@runs_kernels
def test_packed_q_meets_twelve_modules_at_most(cold: None) -> None:
    q, k, v = (tensor[0] for tensor in make_small(37, 37))
    starts = torch.tensor([0, 20, 37], dtype=torch.int32, device=q.device)
    met = modules_met(lambda: attention_varlen(q, k, v, starts, starts, causal=True), is_part_of(q))
    assert met[0] == "fa_autotune.ops.api"
    assert "fa_autotune.kernels.fast_launch" in met
    assert len(met) <= 12, met


@runs_kernels
def test_a_cap_meets_fourteen_modules_at_most(cold: None) -> None:
    q, k, v = make_small()
    cap = 7.28125
    met = modules_met(lambda: attention(q, k, v, causal=True, softcap=cap), lambda value: value is cap)
    assert "fa_autotune.kernels.fast_launch" in met
    assert len(met) <= 14, met


@pytest.mark.parametrize("seqlen", [37, 40])
@runs_kernels
def test_a_repeated_call_meets_fewer(seqlen: int, cold: None) -> None:
    q, k, v = make_small(seqlen, seqlen)
    first = modules_met(lambda: attention(q, k, v), is_part_of(q))
    again = modules_met(lambda: attention(q, k, v), is_part_of(q))
    assert set(again) < set(first)
