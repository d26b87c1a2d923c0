"""How far apart the shapes of two problems are for a kernel."""

import math

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem, AttentionShape, visible_pairs

ShapeFeatures = tuple[float, float, float, float]  # in doublings, each times what it weighs
ROUNDED_BY = 1e-6  # distances closer than this may be equal once they are rounded


def shape_distance(first: AttentionProblem, second: AttentionProblem, num_sms: int) -> float:
    """How far two problems of a family are apart for a kernel, in doublings; 0 for equal work.

    Counted are the keys that a query row loops over, the query rows that a tile can hold, how often the GPU is filled,
    and (little) the heads that share K and V; for dk and dv the query rows that a key loops over, and so on. Each
    saturates where a larger number no longer changes the best tile.
    """
    return distance(*(shape_features(problem.family, problem.shape, num_sms) for problem in (first, second)))


def distance(first: ShapeFeatures, second: ShapeFeatures) -> float:
    """`shape_distance` by the features of the two."""
    # Rounded, so that the last bit of a logarithm never decides between two ranks.
    return round(unrounded_distance(first, second), 6)


def unrounded_distance(first: ShapeFeatures, second: ShapeFeatures) -> float:
    """The same but for rounding, which takes as long as all else."""
    loop, rows, waves, group = first
    other_loop, other_rows, other_waves, other_group = second
    return abs(loop - other_loop) + abs(rows - other_rows) + abs(waves - other_waves) + abs(group - other_group)


def shape_features(family: AttentionFamily, shape: AttentionShape, num_sms: int) -> ShapeFeatures:
    """What counts of a shape for the kernels of a family."""
    owned, heads, loops, group = shape.seqlen_q, shape.num_q_heads, 1, shape.num_q_heads // shape.num_kv_heads
    if family.kernel_pass.spec.owns_keys:
        owned, heads, loops = shape.seqlen_k, shape.num_kv_heads, group
    loop_length = min(max(loops * visible_pairs(family, shape) / owned, 1.0), 8192.0)
    waves = min(max(shape.batch_size * heads * math.ceil(owned / 64) / num_sms, 0.125), 32.0)
    # Halves and quarters are exact, so that weights may come before differences.
    return math.log2(loop_length), math.log2(min(owned, 256)), math.log2(waves) / 2, math.log2(group) / 4
