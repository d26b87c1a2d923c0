"""flash-attention's published tests of dropout, on a GPU: its dtypes, head dims and pairs of lengths, in each of its
forms and with its features in turn, 504 of its points. What was dropped is read from S_dmask, as its tests read it.
"""

from itertools import product

import pytest
import torch

from kit.published_dropout import FIXED, PACKED, DropoutCase, check_dropout
from kit.published_grid import DTYPES, HEAD_DIMS, KV_HEADS, PAIRS

pytestmark = pytest.mark.gpu

FEATURES = (
    {},
    {"causal": True},
    {"local": True},
    {"alibi": True},
    {"causal": True, "alibi": True},
    {"local": True, "alibi": True},
    {"causal": True, "local": True},
)


def cases(dtype: torch.dtype, head_dim: int, forms: tuple[str, ...]) -> list[DropoutCase]:
    """Each pair of lengths once, the first of packed sequences again; forms, kinds of heads and features go round
    together, two features for each dtype and head dim."""
    place = HEAD_DIMS.index(head_dim) * len(DTYPES) + DTYPES.index(dtype)
    found = []
    for number, (seqlen_q, seqlen_k) in enumerate(PAIRS if forms == FIXED else (*PAIRS, PAIRS[0])):
        found.append(
            DropoutCase(
                form=forms[number % len(forms)],
                dtype=dtype,
                head_dim=head_dim,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                kv_heads=list(KV_HEADS.values())[number // 3 % 3],
                **FEATURES[(place + 3 * (number % 2)) % len(FEATURES)],
            )
        )
    return found


@pytest.mark.parametrize("forms", [FIXED, PACKED], ids=["fixed", "packed"])
@pytest.mark.parametrize(("dtype", "head_dim"), list(product(DTYPES, HEAD_DIMS)))
def test_what_s_dmask_tells_was_dropped(dtype: torch.dtype, head_dim: int, forms: tuple[str, ...]) -> None:
    """All cases run, with one or two sets of kernels."""
    wrong = {}
    for case in cases(dtype, head_dim, forms):
        try:
            check_dropout(case)
        except AssertionError as error:
            wrong[case] = str(error).splitlines()[0]
        torch.cuda.empty_cache()  # other workers want memory too
    assert wrong == {}
