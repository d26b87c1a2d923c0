"""Where a search starts, and what runs untuned."""

from hypothesis import assume, given

from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.estimates import whole_smem_bytes
from fa_autotune.space.registry import (
    VariantSpec,
    rejection,
)
from fa_autotune.space.seeds import default_config, seed_configs
from kit.strategies import devices, specs_and_families

H200 = KNOWN_DEVICES["h200"]


@given(specs_and_families(), devices())
def test_the_default_passes_every_constraint_of_every_gpu(
    pair: tuple[VariantSpec, AttentionFamily], device: DeviceSpec
) -> None:
    spec, family = pair
    assume(not spec.variant.is_gluon or spec.supports(family, device.arch, (3, 7)) is None)
    candidate = Candidate(family=family, variant=spec.variant, config=default_config(spec, family, device.arch))
    rejected = rejection(candidate, None, device)
    # The smallest tile of gradients above head_dim 256 is too much for some GPUs; others serve.
    assert rejected is None or (rejected.constraint == "operands" and spec.kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ))


@given(specs_and_families(), devices())
def test_the_default_fits_64_kilobytes_or_what_the_gpus_of_its_variant_have(
    pair: tuple[VariantSpec, AttentionFamily], device: DeviceSpec
) -> None:
    spec, family = pair
    assume(not spec.variant.is_gluon or spec.supports(family, H200.arch, (3, 7)) is None)
    backward_by_descriptors = spec.variant is Variant.TMA and spec.kernel_pass is not Pass.FWD
    large = backward_by_descriptors or spec.variant.is_gluon
    wide = max(family.head_dim, family.head_dim_v) > 256
    large = large or (wide and (spec.kernel_pass is not Pass.FWD or spec.variant is Variant.TMA))
    limit = H200.smem_optin_bytes if large else 99 * 1024 if wide or family.tf32 else 64 * 1024
    assert whole_smem_bytes(family, default_config(spec, family, device.arch)) <= limit


@given(specs_and_families())
def test_seeds_lie_in_the_search_space(pair: tuple[VariantSpec, AttentionFamily]) -> None:
    spec, family = pair
    for config in seed_configs(spec, family, H200.arch):
        rejected = spec.rejection(config, family=family, shape=None, device=H200)
        assert rejected is None or rejected.constraint != "search_space"
