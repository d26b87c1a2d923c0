"""The search over one variant's space."""

import random

from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Variant
from fa_autotune.space.config import HopperWsFwdConfig, Schedule
from fa_autotune.space.registry import variant_spec
from fa_autotune.tuner.study import VariantSearch

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
NARROW = AttentionProblem.parse("4x32x8x4096x4096x64,causal")
WIDE = AttentionProblem.parse("4x8x8x4096x4096x256,causal")


def test_a_step_from_a_schedule_to_another_brings_its_warpgroups_along() -> None:
    search = VariantSearch(NARROW, SPEC, H200, random.Random(0))
    single = HopperWsFwdConfig(SCHEDULE=Schedule.SINGLE, CONSUMERS=1, BLOCK_N=128)
    search.warm_start([single])
    assert search.propose(1, local=False) == [single]
    search.learn(single, 1.0, TrialStatus.OK)
    steps = search.propose(60, local=True)
    assert {config.SCHEDULE for config in steps if isinstance(config, HopperWsFwdConfig)} == set(Schedule)
    assert all(search.rejection(config) is None for config in steps)


def test_a_search_ends_with_every_config_that_passes() -> None:
    search = VariantSearch(WIDE, SPEC, H200, random.Random(0))
    found: list[object] = []
    while batch := search.propose(16, local=False):
        found += batch
        for config in batch:
            search.learn(config, 1.0, TrialStatus.OK)
    assert len(set(found)) == len(found) == 64
