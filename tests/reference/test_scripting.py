"""torch.jit.script is told what to use instead of a function that it can't translate."""

import pytest
import torch
from torch import Tensor

from fa_autotune import dropout_mask
from fa_autotune.errors import UnsupportedError
from fa_autotune.reference.dropout import draw_seed
from fa_autotune.reference.scripting import keep_out_of_scripts


def double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_script_of_what_is_kept_out_is_refused_by_name() -> None:
    assert torch.jit.script(double)(torch.ones(())) == 2
    keep_out_of_scripts(double)
    for function in (double, dropout_mask, draw_seed):
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.script can't translate .*; use torch\.compile"):
            torch.jit.script(function)
