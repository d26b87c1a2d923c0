"""What tests of compiled kernels expect of the installed Triton, and which features a sample for another one has."""

import pytest

from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.problem.passes import Pass
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.compile_candidates import unexpected
from kit.feature_families import FEATURES, fewest_of_all, make_family
from kit.releases import STOPPED_DEFAULTS, THIS_TRITON

FAMILY = make_family(Pass.FWD, "window", head_dim=64)
SPEC = variant_spec(Pass.FWD, Variant.PORTABLE)
DEFAULT = Candidate(family=FAMILY, variant=SPEC.variant, config=default_config(SPEC, FAMILY, "sm_90"))
PASSED = CompileResult(status=TrialStatus.OK)
SPILLED = CompileResult(status=TrialStatus.OVER_RESOURCES, gate="spills")
TOO_LARGE = CompileResult(status=TrialStatus.OVER_RESOURCES, gate="shared_memory")
FAILED = CompileResult(status=TrialStatus.COMPILE_FAILED)


@pytest.mark.parametrize("known", [None, "spills"])
def test_a_default_is_unexpected_unless_it_does_what_is_known_of_this_release(
    known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STOPPED_DEFAULTS, THIS_TRITON, {("sm_90", FAMILY.label, SPEC.variant): known} if known else {})
    noticed = [result for result in (PASSED, SPILLED, TOO_LARGE, FAILED) if unexpected("sm_90", [DEFAULT], [result])]
    assert noticed == ([PASSED, TOO_LARGE, FAILED] if known else [SPILLED, TOO_LARGE, FAILED])
    assert unexpected("sm_80", [DEFAULT], [PASSED]) == {}


def test_the_features_of_a_sample_are_all_that_there_are() -> None:
    chosen = fewest_of_all()
    assert {name for features in chosen for name in FEATURES[features]} == {
        name for features in FEATURES.values() for name in features
    }
    assert len(chosen) < len(FEATURES) / 2
