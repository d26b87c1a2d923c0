"""How far apart the shapes of two problems are for a kernel."""

import math

from fa_autotune.problem.problem import AttentionProblem


def shape_distance(first: AttentionProblem, second: AttentionProblem, num_sms: int) -> float:
    """How far two problems of a family are apart for a kernel, in doublings; 0 for equal work.

    Counted are the keys that a query row loops over, the query rows that a tile can hold, how often the GPU is filled,
    and (little) the heads that share K and V; for dk and dv the query rows that a key loops over, and so on. Each
    saturates where a larger number no longer changes the best tile.
    """
    weights = (1.0, 1.0, 0.5, 0.25)
    pairs = zip(weights, _features(first, num_sms), _features(second, num_sms), strict=True)
    # Rounded, so that the last bit of a logarithm never decides between two ranks.
    return round(sum(weight * abs(a - b) for weight, a, b in pairs), 6)


def _features(problem: AttentionProblem, num_sms: int) -> tuple[float, float, float, float]:
    shape = problem.shape
    owned, heads, loops = shape.seqlen_q, shape.num_q_heads, 1
    if problem.family.kernel_pass.spec.owns_keys:
        owned, heads, loops = shape.seqlen_k, shape.num_kv_heads, shape.gqa_group_size
    loop_length = min(max(loops * problem.visible_pairs / owned, 1.0), 8192.0)
    rows = min(owned, 256)
    waves = shape.batch_size * heads * math.ceil(owned / 64) / num_sms
    waves = min(max(waves, 0.125), 32.0)
    return math.log2(loop_length), math.log2(rows), math.log2(waves), math.log2(shape.gqa_group_size)
