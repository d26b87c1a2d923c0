"""The operators' library: one in a process, also where notebooks and test runners import the package again."""

import subprocess
import sys

import pytest
import torch

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops import operators

AGAIN = """
import sys, torch
import fa_autotune.ops.api
first, q = sys.modules["fa_autotune.ops.api"].attention, torch.randn(1, 8, 2, 16)
for _ in range(2):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fa_autotune"]:
        del sys.modules[name]
    from fa_autotune import attention, errors
    assert attention is not first
    x = q.clone().requires_grad_()
    attention(x, x, x, backend="reference").sum().backward()
    by_operator = torch.ops.fa_autotune.forward(q, q, q, None, 0, 1, 0)[0]
    assert torch.equal(by_operator, first(q, q, q, backend="reference"))
    try:
        torch.ops.fa_autotune.forward(q, q[..., :8], q, None, 0, 1, 0)
    except errors.InvalidProblemError:
        print("served again")
"""


def test_the_package_may_be_imported_again_after_a_purge() -> None:
    command = [sys.executable, "-W", "ignore", "-c", AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["served again"] * 2


def test_where_torch_cannot_define_operators_anew_the_process_is_to_be_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "take_down", lambda library: None)
    with pytest.raises(UnsupportedError, match=r"purged from sys\.modules, .* restart the process"):
        operators._made_library()
    assert vars(torch.ops.fa_autotune)["library"] is operators.LIBRARY
