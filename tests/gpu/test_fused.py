"""The fused backward's three kernels, one after the other, on a Hopper GPU: values, edges, order, repeats.

`pytest -m gpu -n 0`. Gluon has no interpreter, so nothing else runs the fused kernels as they are. Skipped where there
is no sm_90.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fa_autotune.kernels.gpu import live_device
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.reference.attention import attention_gradients, attention_reference
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.space.workspace import dq_acc_size, is_wide, statistics_size, turns_size

pytestmark = pytest.mark.gpu

REPEATS = 100
SMALLEST_VALUE = 1e-3  # root mean square of gradients that an error is compared with; some are 0, but for rounding
LARGEST_ERROR = 8e-3  # relative, of the whole tensor: bfloat16 has 8 bits, and dS is rounded to it


@pytest.fixture(autouse=True)
def hopper() -> None:
    device = live_device(0)
    if device.arch != "sm_90":
        pytest.skip(f"{device.name} is no sm_90")


def make_family(
    head_dims: tuple[int, int] = (128, 128),
    *,
    causal: bool = True,
    dtype: DType = DType.BFLOAT16,
    unordered: bool = False,
) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=Pass.BWD_FUSED,
        dtype=dtype,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        bounded_right=causal,
        unordered=unordered,
    )


@cache
def kernel_of(family: AttentionFamily, **knobs: KnobValue) -> LoadedKernel:
    fused = Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS
    variant = fused if family.kernel_pass is Pass.BWD_FUSED else Variant.PORTABLE
    spec = variant_spec(family.kernel_pass, variant)
    config = replace(default_config(spec, family, "sm_90"), **knobs)  # type: ignore[arg-type]
    return load_kernel(Candidate(family=family, variant=variant, config=config), "sm_90", 0)


def run(kernel: LoadedKernel, owner: Tensor, *values: object) -> None:
    grid = kernel.module.grid(owner.shape[0], owner.shape[1], owner.shape[2])
    kernel.run(grid, kernel.module.arguments(*values))


@dataclass
class Call:
    """A backward with everything that its kernels read and write; outputs and workspace hold NaN before."""

    family: AttentionFamily
    shape: AttentionShape
    diagonal: int | None
    bshd: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        shape, family = self.shape, self.family
        dtype = getattr(torch, family.dtype.value)

        def draw(heads: int, seqlen: int, head_dim: int) -> Tensor:
            axes = (seqlen, heads) if self.bshd else (heads, seqlen)
            drawn = torch.randn(shape.batch_size, *axes, head_dim, generator=generator, device="cuda")
            return (drawn.transpose(1, 2) if self.bshd else drawn).to(dtype)

        self.q = draw(shape.num_q_heads, shape.seqlen_q, family.head_dim)
        self.k = draw(shape.num_kv_heads, shape.seqlen_k, family.head_dim)
        self.v = draw(shape.num_kv_heads, shape.seqlen_k, family.head_dim_v)
        self.d_out = draw(shape.num_q_heads, shape.seqlen_q, family.head_dim_v)
        self.prepare()

    def prepare(self) -> None:
        """What the fused kernel reads besides the inputs, and the exact gradients; keys that no row sees become NaN."""
        shape, family = self.shape, self.family
        self.softmax_scale = family.head_dim**-0.5
        inputs = (self.q, self.k, self.v)
        out, self.lse = attention_reference(*inputs, softmax_scale=self.softmax_scale, diagonal=self.diagonal)
        self.out = torch.empty_like(self.d_out).copy_(out)
        self.exact = attention_gradients(*inputs, self.d_out, softmax_scale=self.softmax_scale, diagonal=self.diagonal)
        if self.diagonal is not None and (seen := max(0, shape.seqlen_q + self.diagonal)) < shape.seqlen_k:
            self.k[:, :, seen:] = self.v[:, :, seen:] = float("nan")
        self.statistics = torch.full(statistics_size(shape), float("nan"), device="cuda")
        self.turns = torch.full(turns_size(shape), 7, dtype=torch.int32, device="cuda")
        self.dq_acc = torch.full(dq_acc_size(family, shape), float("nan"), device="cuda")
        before = AttentionFamily(
            kernel_pass=Pass.BWD_PREPROCESS,
            dtype=family.dtype,
            head_dim=family.head_dim_v,
            head_dim_v=family.head_dim_v,
            bounded_right=False,
        )
        run(kernel_of(before), self.out, self.out, self.d_out, self.lse, self.statistics, self.turns)

    def gradients(self, **knobs: KnobValue) -> list[Tensor]:
        """[dq, dk, dv], from the fused kernel on; turns are 0 afterwards as before."""
        dq, dk, dv = (torch.full_like(one, float("nan")) for one in (self.q, self.k, self.v))
        if self.family.unordered:
            self.dq_acc.zero_()
        fused = (self.q, self.k, self.v, self.d_out, self.statistics, self.turns, dk, dv, self.dq_acc)
        run(kernel_of(self.family, **knobs), self.k, *fused, self.softmax_scale, self.diagonal)
        after = AttentionFamily(
            kernel_pass=Pass.BWD_POSTPROCESS,
            dtype=self.family.dtype,
            head_dim=self.family.head_dim,
            head_dim_v=self.family.head_dim_v,
            bounded_right=self.family.bounded_right,
        )
        run(kernel_of(after), dq, self.dq_acc, dq, self.softmax_scale, self.diagonal)
        torch.cuda.synchronize()
        assert not self.turns.any(), "a turn counter was left at another value than 0"
        return [dq, dk, dv]

    def check(self, **knobs: KnobValue) -> None:
        for name, found, exact in zip(("dq", "dk", "dv"), self.gradients(**knobs), self.exact, strict=True):
            assert not found.isnan().any(), name
            size = exact.norm().clamp_min(SMALLEST_VALUE * exact.numel() ** 0.5)
            error = (found.float() - exact).norm() / size
            assert error < LARGEST_ERROR, f"{name}: {error:.2e}"
            if self.diagonal is not None:
                first_row, seen = max(0, -self.diagonal), max(0, self.shape.seqlen_q + self.diagonal)
                nothing = found[:, :, :first_row] if name == "dq" else found[:, :, seen:]
                assert (nothing == 0).all(), f"{name} of what sees nothing, or is not seen, is not 0"


def make_call(
    family: AttentionFamily,
    heads: tuple[int, int, int] = (2, 4, 2),
    lengths: tuple[int, int] = (300, 300),
    diagonal: int | None = None,
    *,
    bshd: bool = False,
) -> Call:
    """A call of (batch size, query heads, kv heads); the diagonal is bottom-right unless given."""
    (batch_size, num_q_heads, num_kv_heads), (seqlen_q, seqlen_k) = heads, lengths
    shape = AttentionShape(
        batch_size=batch_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
    )
    bound = (seqlen_k - seqlen_q if diagonal is None else diagonal) if family.bounded_right else None
    return Call(family, shape, bound, bshd)


WIDE = [(256, 256), (192, 192), (192, 128), (64, 256), (136, 200)]
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])
ORDERS = [{"DIAGONAL_FIRST": False}, {"DIAGONAL_FIRST": True}]


@pytest.mark.parametrize("unordered", [False, True], ids=["ordered", "unordered"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (40, 64), (96, 72), (8, 128), *WIDE], ids=str)
def test_gradients_of_every_width(head_dims: tuple[int, int], causal: bool, dtype: DType, unordered: bool) -> None:
    family = make_family(head_dims, causal=causal, dtype=dtype, unordered=unordered)
    call = make_call(family)
    for knobs in ORDERS if causal else ORDERS[:1]:
        call.check(**knobs)


@HEAD_DIMS
@pytest.mark.parametrize(
    "lengths", [(1, 1), (64, 64), (130, 130), (333, 333), (1000, 1024), (77, 500), (500, 77)], ids=str
)
@pytest.mark.parametrize("diagonal", [None, 0, -100, 63], ids=str)
def test_gradients_of_causal_lengths_and_diagonals(
    head_dim: int, lengths: tuple[int, int], diagonal: int | None
) -> None:
    call = make_call(make_family((head_dim, head_dim)), (1, 6, 2), lengths, diagonal)
    for knobs in ORDERS:
        call.check(**knobs)


@HEAD_DIMS
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (130, 333), (1024, 1000)], ids=str)
def test_gradients_of_full_lengths(head_dim: int, lengths: tuple[int, int]) -> None:
    make_call(make_family((head_dim, head_dim), causal=False), (2, 3, 1), lengths).check()


@HEAD_DIMS
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_knobs_keep_every_bit(head_dim: int, causal: bool) -> None:
    """Also heads that straddle waves of programs."""
    call = make_call(make_family((head_dim, head_dim), causal=causal), (2, 40, 20), (1024, 1024), bshd=True)
    call.check(HEADS_PER_GROUP=8)
    first = call.gradients(HEADS_PER_GROUP=8)
    others: list[dict[str, KnobValue]] = [{"HEADS_PER_GROUP": heads} for heads in (1, 2, 32)] + [
        {"EXACT_LENGTHS": True}
    ]
    if head_dim == 128:
        others.append({"SCORES_EARLY": True})
    if head_dim == 256:
        others += [{"DQ_STAGES": 1}, {"DQ_STAGES": 2}, {"DO_STAGES": 2, "DQ_STAGES": 1}]
    for knobs in others:
        assert all(map(torch.equal, first, call.gradients(**knobs))), knobs


@HEAD_DIMS
@pytest.mark.parametrize(("causal", "diagonal_first"), [(False, False), (True, False), (True, True)])
def test_a_repeated_launch_gives_the_same_bits_without_new_statistics(
    head_dim: int, causal: bool, diagonal_first: bool
) -> None:
    call = make_call(make_family((head_dim, head_dim), causal=causal), (1, 40, 8), (2000, 2000))
    first = call.gradients(DIAGONAL_FIRST=diagonal_first)
    for _ in range(REPEATS):
        assert all(map(torch.equal, first, call.gradients(DIAGONAL_FIRST=diagonal_first)))


@HEAD_DIMS
def test_a_launch_beside_other_work_gives_the_same_bits(head_dim: int) -> None:
    """Programs wait for those before them, which must have started however few fit beside another kernel."""
    call = make_call(make_family((head_dim, head_dim)), (1, 40, 8), (2000, 2000))
    first = call.gradients()
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    for _ in range(REPEATS):
        with torch.cuda.stream(side):
            for _ in range(4):
                noise @ noise
        assert all(map(torch.equal, first, call.gradients()))


@HEAD_DIMS
def test_an_infinite_p_of_keys_that_are_not_there_does_not_reach_dq(head_dim: int) -> None:
    """All scores are far below 0, and so is lse: of a key of zeros P is exp2(-lse), which is infinite."""
    call = make_call(make_family((head_dim, head_dim), causal=False), (1, 2, 2), (100, 100))
    call.q.fill_(30.0)
    call.k.sub_(30.0)
    call.prepare()
    assert call.lse.max() < -1000.0
    for found in call.gradients():
        assert found.isfinite().all()
