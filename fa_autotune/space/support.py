"""Which families a variant serves, on which GPU and with which Triton: the reason why it can't, or None."""

from fa_autotune.problem.device import INTERPRETER_ARCH
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.space.estimates import WIDEST_BUSY, WIDEST_PIECE, copies_mask, multiplies_by_warp
from fa_autotune.space.tiles import is_in_pieces
from fa_autotune.space.workspace import NARROW_HEAD_DIM, PART_ROWS, WIDEST_SHARED, fused_tile, is_wide

MIN_TRITON = (3, 6)
TESTED_TRITONS = (MIN_TRITON, (3, 7), (3, 8), (3, 9))  # every variant was compiled with; newer ones are tried
WIDEST_VARLEN_WINDOW = 192  # of the fused backward, with both edges
WIDEST_WITH_LEFT_WINDOW = 192  # head_dim_v of the Hopper forward; wider ones spill in their loops
WIDEST_BY_ELEMENTS = 128  # the same beside a mask that is not copied
WIDEST_WITH_DROPOUT = 192  # head_dim_v of the fused backward of wide head dims


def untested(triton_version: tuple[int, int]) -> str | None:
    """What is to be known of a Triton that is newer than all that kernels were tested with, or None."""
    if triton_version <= TESTED_TRITONS[-1]:
        return None
    found, first, last = (".".join(map(str, version)) for version in (triton_version, MIN_TRITON, TESTED_TRITONS[-1]))
    return f"Triton {found} is newer than those that kernels were tested with, {first} to {last}"


def _too_old(triton_version: tuple[int, int]) -> str:
    return f"needs Triton {'.'.join(map(str, MIN_TRITON))} or newer, not {'.'.join(map(str, triton_version))}"


def portable_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """Why kernels that read through pointers don't serve a family, or None."""
    if family.tf32 and is_in_pieces(family):
        return f"tiles for tf32 spill above head_dim {WIDEST_PIECE}; leave tf32 out"
    if triton_version < MIN_TRITON:
        return _too_old(triton_version)
    if arch.startswith("sm_"):
        capability = int(arch.removeprefix("sm_"))
        if capability < 75:
            return f"Triton compiles for sm_75 and newer, not {arch}"
        if capability < 80 and family.dtype is DType.BFLOAT16:
            return f"bfloat16 matrix products need sm_80, not {arch}; use float16"
        if capability < 80 and family.tf32:
            return f"tf32 matrix products need sm_80, not {arch}; leave tf32 out"
        return None
    if family.tf32 and arch != INTERPRETER_ARCH:
        return f"tf32 is multiplied by NVIDIA's tensor cores, not by {arch}; leave tf32 out"
    return (
        None if arch.startswith("gfx9") or arch == INTERPRETER_ARCH else f"{arch} is not a GPU that Triton compiles for"
    )


def tma_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """The same of kernels that read through tensor descriptors."""
    if arch != INTERPRETER_ARCH and not (arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90):
        return f"tensor descriptors need sm_90 or newer, not {arch}"
    if family.access is not Access.TMA:
        return f"tensor descriptors can't read these pointers and strides (access={family.access.value})"
    if family.tf32:
        return "tf32 products read what pointers bring; the portable variant serves"
    if family.dtype is DType.FLOAT32:
        return "float32 products run on the FMA units, where tiles from descriptors spill; the portable variant serves"
    if family.varlen:
        return (
            "a descriptor's tile reads on past the end of a sequence, where another's values may be NaN or Inf; the "
            "portable variant serves"
        )
    if family.dropout and family.bounded_left and family.kernel_pass is not Pass.BWD_DKDV:
        return "dropout wants whole 16 keys, and descriptors would read some that no row sees; the portable one serves"
    if is_in_pieces(family) and multiplies_by_warp(arch):
        return f"on {arch} head dims above {WIDEST_PIECE} from descriptors spill; the portable variant serves"
    return portable_supports(family, arch, triton_version)


def _hopper_ws_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    if arch != "sm_90":
        return f"its asynchronous matrix products (wgmma) are sm_90's alone, {arch} has none"
    if triton_version < MIN_TRITON:
        return _too_old(triton_version)
    if is_in_pieces(family):
        return _too_wide(family)
    if family.access is not Access.TMA:
        return f"tensor descriptors can't read these pointers and strides (access={family.access.value})"
    if family.dtype is DType.FLOAT32:
        return "wgmma multiplies no float32 in ieee precision; the portable variant serves"
    return None


def hopper_forward_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """The same of the warp-specialised forward."""
    if reason := _hopper_ws_supports(family, arch, triton_version):
        return reason
    if family.bounded_left and family.head_dim_v > WIDEST_WITH_LEFT_WINDOW:
        return (
            f"both edges of a window need registers that head_dim_v={family.head_dim_v} does not leave, "
            f"{WIDEST_WITH_LEFT_WINDOW} at most does; the tma variant serves"
        )
    if family.dropout and family.bounded_left:
        return "dropout wants whole 16 keys, and descriptors would read some that no row sees; the portable one serves"
    return _too_busy(family)


def _too_busy(family: AttentionFamily) -> str | None:
    """Why a mask or dropout leave no registers for all else that is computed beside the products."""
    others = f"head_dim_v={family.head_dim_v} leaves no registers for"
    end = "the tma and portable variants serve"
    if family.has_mask and not copies_mask(family) and family.head_dim_v > WIDEST_BY_ELEMENTS:
        return f"{others} a mask that is read by elements, {WIDEST_BY_ELEMENTS} does; {end}"
    if not (family.has_mask or family.dropout) or family.head_dim_v <= WIDEST_BUSY:
        return None
    if family.wide_bias:
        return f"{others} a mask in fp32, {WIDEST_BUSY} does; {end}"
    found = [name for name in ("has_mask", "dropout", "softcap", "alibi") if getattr(family, name)]
    words = " and ".join(found).replace("has_mask", "attn_mask")
    return f"{others} {words} at once; {end}" if len(found) > 1 else None


def _too_wide(family: AttentionFamily) -> str:
    widest = max(family.head_dim, family.head_dim_v)
    return f"its warpgroups have registers for head dims up to {WIDEST_PIECE}, not {widest}; others serve"


def _unknown_to_fused(family: AttentionFamily) -> str | None:
    """What the fused backwards, and the kernels beside them, do not know yet."""
    lacks = {"has_mask": "attn_mask"}
    if family.varlen:
        lacks |= {"alibi": "ALiBi of packed sequences", "dropout": "dropout of packed sequences"}
    found = [words for name, words in lacks.items() if getattr(family, name)]
    others = "portable variant serves" if family.varlen else "tma and portable variants serve"
    return f"it knows no {' and no '.join(found)}; the {others}" if found else None


def _spills_in_fused(family: AttentionFamily) -> str | None:
    """Which features together take more registers than the gradients of a tile leave, or None."""
    if family.softcap and family.alibi and family.dropout:
        return "dropout of capped scores with ALiBi spills; the tma and portable variants serve"
    if family.softcap and family.bounded_left and family.dropout and not is_wide(family):
        return f"dropout of capped scores in a window spills up to head_dim {WIDEST_SHARED}; the others serve"
    widest, is_window = max(family.head_dim, family.head_dim_v), family.bounded_left and family.bounded_right
    if family.varlen and is_window and not family.softcap and widest > WIDEST_VARLEN_WINDOW:
        return (
            f"both edges of a window spill above head_dim {WIDEST_VARLEN_WINDOW} where sequences are packed; the "
            "portable variant serves"
        )
    if widest <= NARROW_HEAD_DIM:
        return None
    if family.softcap and family.alibi:
        return f"capped scores with ALiBi spill above head_dim {NARROW_HEAD_DIM}; the tma and portable variants serve"
    if not family.dropout:
        return None
    if not is_wide(family) and (family.softcap or family.bounded_left or family.alibi):
        what = "of capped scores" if family.softcap else "in a window" if family.bounded_left else "beside ALiBi"
        return f"dropout {what} spills above head_dim {NARROW_HEAD_DIM}; the tma and portable variants serve"
    if family.head_dim_v > WIDEST_WITH_DROPOUT:
        return f"dropout spills above head_dim_v {WIDEST_WITH_DROPOUT}; the tma and portable variants serve"
    return None


def fused_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """The same of the fused backward whose warpgroups share out dk and dv."""
    if is_wide(family):
        widest = max(family.head_dim, family.head_dim_v)
        return f"its warpgroups share out dk and dv up to head_dim {WIDEST_SHARED}, not {widest}; hopper_wide serves"
    narrow = fused_tile(family).block_m > PART_ROWS
    if family.unordered and family.softcap and family.bounded_left and narrow and family.dtype is DType.FLOAT16:
        return "a window of capped scores in float16 spills where dq is added in any order; in order it is served"
    found = _hopper_ws_supports(family, arch, triton_version) or _unknown_to_fused(family)
    return found or _spills_in_fused(family)


def wide_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """The same of the fused backward of wide head dims."""
    if not is_wide(family):
        return f"it is for head dims above {WIDEST_SHARED}; hopper_ws serves"
    found = _hopper_ws_supports(family, arch, triton_version) or _unknown_to_fused(family)
    return found or _spills_in_fused(family)


def beside_fused_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """The kernels before and after the fused one serve where it may be; the interpreter tests them alone."""
    if arch not in ("sm_90", INTERPRETER_ARCH):
        return f"it goes with the fused kernel, which is for sm_90, not {arch}"
    if family.dtype is DType.FLOAT32:
        return "it goes with the fused kernel, which multiplies no float32"
    if is_in_pieces(family):
        return f"it goes with the fused kernel, which serves head dims up to {WIDEST_PIECE}"
    return portable_supports(family, arch, triton_version) or _unknown_to_fused(family)


def tma_backward_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    """The same of the backward's kernels that read through tensor descriptors."""
    if is_in_pieces(family):
        return (
            f"a tile of 64 rows and its gradients fit registers up to head_dim {WIDEST_PIECE}; the portable one serves"
        )
    if multiplies_by_warp(arch):
        return f"on {arch} a backward keeps the tiles of descriptors in registers, and spills; the portable one serves"
    return tma_supports(family, arch, triton_version)
