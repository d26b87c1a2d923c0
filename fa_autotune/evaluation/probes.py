"""Small calls around a kernel's blocks that it must get right."""

from dataclasses import dataclass, replace

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.problem.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One small call that a kernel must get right. `top_left` puts a row's own key at 0 instead of bottom-right.

    `sequences` are those of a varlen family, whose diagonals count from bottom-right; the shape's lengths are the most.
    """

    shape: AttentionShape
    scale: float = 1.0
    top_left: bool = False
    seed: int = 0
    sequences: Sequences | None = None

    def diagonal(self, family: AttentionFamily) -> int | None:
        """The kernel's diagonal argument for this probe."""
        return self.offset + self.shape.window_right if family.bounded_right else None

    @property
    def offset(self) -> int:
        """Row i's own key is i + offset."""
        return 0 if self.top_left or self.sequences else self.shape.seqlen_k - self.shape.seqlen_q


def probes(
    family: AttentionFamily, *, block_m: int, block_n: int, exact_lengths: bool, programs: int = 0
) -> list[Probe]:
    """Calls around a kernel's blocks: ragged ends, both orders of the lengths, GQA, empty rows, large magnitudes.

    `programs`: how many a persistent kernel runs at most; then there are calls that give each several query tiles.
    """
    if family.varlen:
        found = _of_sequences(block_m, block_n)
        if family.kernel_pass is Pass.BWD_FUSED and programs:
            found.append(_of_waiting_programs(block_m, block_n, heads=2 * -(-programs // 5)))
    else:
        found = _probes(block_m=block_m, block_n=block_n, exact_lengths=exact_lengths, programs=programs)
    if not family.bounded_left:
        return found
    return _in_windows(family, found, block_m, block_n, exact_lengths)


def _in_windows(
    family: AttentionFamily, probe_list: list[Probe], block_m: int, block_n: int, exact_lengths: bool
) -> list[Probe]:
    """The calls in windows of all widths, and two more: whole blocks inside a window, keys before every window."""
    wide = block_m + 2 * block_n  # with whole blocks inside it
    lefts, rights = (wide, 0, block_n + 1, 3, wide + 5, 1), (0, block_n - 1, 0, 2, 0, wide)
    long, end = 2 * block_m * -(-wide // block_m), 0 if exact_lengths else 3
    keys = block_n * -(-2 * wide // block_n)
    one = AttentionShape(
        batch_size=1, num_q_heads=2, num_kv_heads=1, seqlen_q=long - end, seqlen_k=keys + block_n + end
    )
    more = [
        Probe(shape=replace(one, window_left=wide), seed=8),
        Probe(shape=replace(one, seqlen_q=block_m, window_left=wide - block_n - 1), seed=9),
    ]
    if family.varlen:
        more = [replace(probe, sequences=Sequences.equal(probe.shape)) for probe in more]
    windows = [
        replace(probe.shape, window_left=lefts[n % 6], window_right=rights[n % 6] if family.bounded_right else 0)
        for n, probe in enumerate(probe_list)
    ]
    return [*(replace(probe, shape=shape) for probe, shape in zip(probe_list, windows, strict=True)), *more]


def _of_waiting_programs(block_m: int, block_n: int, heads: int) -> Probe:
    """Sequences of several blocks for more programs than run together, which wait for one another."""
    lengths_q, lengths_k = (4 * block_m + 1, 0, 3 * block_m - 1), (5 * block_n - 1, 3, 4 * block_n + 3)
    shape = AttentionShape(
        batch_size=3,
        num_q_heads=heads,
        num_kv_heads=heads // 2,
        seqlen_q=max(lengths_q),
        seqlen_k=max(lengths_k),
    )
    return Probe(shape=shape, sequences=Sequences(lengths_q=lengths_q, lengths_k=lengths_k), seed=6)


def _of_sequences(block_m: int, block_n: int) -> list[Probe]:
    """Sequences round the blocks, empty on either side, at the start, at the end and all of them; rows of none."""
    long = 2 * max(block_m, block_n)

    def probe(
        lengths: list[tuple[int, int]],
        *,
        heads: int = 2,
        group: int = 1,
        unused: tuple[int, int] = (0, 0),
        seed: int = 0,
    ) -> Probe:
        lengths_q, lengths_k = zip(*lengths, strict=True)
        return Probe(
            shape=AttentionShape(
                batch_size=len(lengths),
                num_q_heads=heads,
                num_kv_heads=heads // group,
                seqlen_q=max(1, *lengths_q),
                seqlen_k=max(1, *lengths_k),
            ),
            sequences=Sequences(lengths_q=lengths_q, lengths_k=lengths_k, unused_q=unused[0], unused_k=unused[1]),
            scale=4.0 if seed % 3 == 2 else 1.0,
            seed=seed,
        )

    ragged = [(block_m + 1, block_m + 2 * block_n - 1), (1, block_n + 1), (block_m, block_n), (long + 3, block_n - 1)]
    return [
        probe(ragged, heads=4, group=2),
        probe([(0, 5), (long, long + 1), (0, 0), (7, 0), (3, 2), (0, 3)], unused=(block_m + 5, block_n + 3), seed=1),
        probe([(long + 1, long + 1)], seed=2),
        probe([(1, 1), *[(0, 0)] * 130, (block_m - 1, block_n + 2), (0, 1), (2, 3)], heads=1, seed=3),
        probe([(0, block_n), (0, 0)], unused=(3, 0), seed=4),
        probe([(block_m + 2, 0), (2, 0), (block_m - 1, long + 5)], unused=(0, 2), heads=4, group=2, seed=5),
    ]


def _probes(*, block_m: int, block_n: int, exact_lengths: bool, programs: int) -> list[Probe]:
    def shape(seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads: int = 2, group: int = 1) -> AttentionShape:
        return AttentionShape(
            batch_size=batch, num_q_heads=heads, num_kv_heads=heads // group, seqlen_q=seqlen_q, seqlen_k=seqlen_k
        )

    many: list[Probe] = []
    heads = -(-programs // 4)  # 3 to 5 tiles for each program
    if exact_lengths:
        if programs:
            exact = shape(4 * block_m, 3 * block_n, batch=4, heads=heads)
            many = [Probe(shape=exact, seed=6), Probe(shape=exact, top_left=True, seed=7)]
        return [
            *many,
            Probe(shape=shape(2 * block_m, (2 * block_m // block_n + 1) * block_n, batch=2, heads=4, group=2)),
            Probe(shape=shape((block_n // block_m + 2) * block_m, block_n), scale=4.0, seed=1),
            Probe(shape=shape(block_m, (block_m // block_n + 1) * block_n), top_left=True, seed=2),
        ]
    long = 2 * max(block_m, block_n)
    if programs:
        ragged, top_left = (
            shape(4 * block_m + 1, 2 * block_n + 3, batch=4, heads=heads),
            shape(3 * block_m - 1, 5 * block_n - 1, batch=2, heads=2 * heads, group=2),
        )
        many = [Probe(shape=ragged, seed=6), Probe(shape=top_left, top_left=True, seed=7)]
    return [
        *many,
        Probe(shape=shape(block_m + 1, block_m + 2 * block_n - 1, batch=2, heads=6, group=3)),
        Probe(shape=shape(long + 3, block_n - 1), seed=1),  # causal: rows without a visible key
        Probe(shape=shape(long + 1, long + 1), scale=4.0, seed=2),
        Probe(shape=shape(1, block_n + 1, batch=3), seed=3),
        Probe(shape=shape(long, long), top_left=True, seed=4),
        Probe(shape=shape(block_m - 1, long + 5), top_left=True, scale=4.0, seed=5),
    ]
