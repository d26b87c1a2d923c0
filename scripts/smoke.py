"""Try an installed fa_autotune: render every template, run attention in Triton's interpreter, hold it to torch's.

Needs neither a GPU nor a checkout: `python -P scripts/smoke.py`. Exits with an error if anything is wrong.
"""

import os
import platform
import warnings

os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported


def rendered() -> int:
    """Renders each variant's default for a family that it serves on an H200. Gives their number."""
    from fa_autotune.kernels.render import render
    from fa_autotune.problem.family import Access, AttentionFamily, DType
    from fa_autotune.problem.passes import KEYLESS_PASSES
    from fa_autotune.space.candidate import Candidate
    from fa_autotune.space.registry import VARIANTS
    from fa_autotune.space.seeds import default_config

    for spec in VARIANTS:
        families = [
            AttentionFamily(
                kernel_pass=spec.kernel_pass,
                dtype=DType.BFLOAT16,
                head_dim=head_dim,
                head_dim_v=head_dim,
                bounded_right=spec.kernel_pass not in KEYLESS_PASSES,
                access=Access.TMA,
            )
            for head_dim in (64, 256)
        ]
        family = next(one for one in families if spec.supports(one, "sm_90", (3, 7)) is None)
        source = render(Candidate(family=family, variant=spec.variant, config=default_config(spec, family, "sm_90")))
        compile(source.text, source.name, "exec")
    return len(VARIANTS)


def interpreted() -> None:
    """A forward and a backward of ragged grouped-query attention, in fp32, through generated kernels."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from fa_autotune import attention, explain

    q = torch.randn(1, 4, 37, 16, requires_grad=True)
    k, v = (torch.randn(1, 2, 37, 16, requires_grad=True) for _ in range(2))
    results = []
    for attend in (
        lambda: attention(q, k, v, causal=True, layout="bhsd"),
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    ):
        out = attend()
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    decided = str(explain("1x4x2x37x37x16,causal,fp32"))
    assert "kernel  portable" in decided, decided


def main() -> None:
    warnings.filterwarnings("error", module=r"fa_autotune\b")
    import torch
    import triton

    number = rendered()
    interpreted()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{versions}: {number} templates rendered, attention interpreted as torch computes it")


if __name__ == "__main__":
    main()
