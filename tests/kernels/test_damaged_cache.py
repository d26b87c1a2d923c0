"""A cache folder that is damaged at random: each call gives what it gave before, or says which folder it refuses."""

import inspect
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from fa_autotune.errors import MachineError
from fa_autotune.kernels import modules
from fa_autotune.kernels.compiled_files import CompiledFiles
from fa_autotune.kernels.modules import candidates_dir, load_module, write_module
from fa_autotune.kernels.render import KernelSource
from kit.rights import outcome

LONGEST_CALL_S = 5.0
TEXT = '"""A generated module."""\n\n\ndef kernel():\n    return 42\n' + "# more of it\n" * 100
SOURCE = KernelSource(text=TEXT, digest="0123456789abcdef", name="fwd_0123456789abcdef")
CONTENTS = {"k.ttir": b"ir" * 500, "k.ptx": b"ptx" * 500, "k.cubin": bytes(range(256)) * 20, "k.json": b'{"shared": 1}'}

Mutation = Callable[[Path, random.Random], object]
User = Callable[[Callable[[], str]], str]


def flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncated(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def sparse(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice([2**20, 2**26 + 1, 30 * 2**30]))


def in_place_of_it(make: Callable[[Path], object]) -> Mutation:
    def mutate(path: Path, rng: random.Random) -> None:
        removed(path, rng)
        make(path)

    return mutate


def removed(path: Path, rng: random.Random) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def moved_behind_a_link(path: Path, rng: random.Random) -> None:
    kept = path.parent / f"kept-{rng.randrange(10**9)}"
    path.rename(kept)
    path.symlink_to(kept)


def with_other_rights(path: Path, rng: random.Random) -> None:
    path.chmod(rng.choice([0o000, 0o200, 0o400, 0o444, 0o555, 0o666, 0o777, 0o770, 0o1777]))


OF_FILES: list[Mutation] = [
    flipped,
    truncated,
    sparse,
    lambda path, rng: path.write_bytes(rng.randbytes(rng.randrange(2000))),
    lambda path, rng: path.write_text(rng.choice(["null", "[]", "{}", '"k.json"', "[" * 100_000, '{"k.json": 1}'])),
]
OF_ANYTHING: list[Mutation] = [
    removed,
    moved_behind_a_link,
    with_other_rights,
    in_place_of_it(lambda path: path.symlink_to(path.parent)),
    in_place_of_it(lambda path: path.symlink_to(path)),
    in_place_of_it(lambda path: path.symlink_to("/dev/zero")),
    in_place_of_it(os.mkfifo),
    in_place_of_it(Path.mkdir),
    in_place_of_it(lambda path: path.write_text("a file")),
    in_place_of_it(lambda path: (path / "folder").mkdir(parents=True)),
]


def call() -> None:
    """What a call does with the cache: the module's text is run, and its compiled kernel is found or made anew."""
    modules._loaded.clear()  # as in a new process
    module = load_module(write_module(SOURCE, candidates_dir()))
    assert (module.kernel(), inspect.getsource(module.kernel)) == (42, "def kernel():\n    return 42\n")
    files = CompiledFiles("KEY")
    found = files.get_group("k.json")
    if found is None:
        found = {name: files.put(content, name) for name, content in CONTENTS.items()}
        files.put_group("k.json", found)
    assert {name: Path(path).read_bytes() for name, path in found.items()} == CONTENTS


def damage(cache: Path, rng: random.Random) -> str:
    """Mutate what lies in the cache; gives what was done."""
    path: Path = cache
    mutation: Mutation = with_other_rights  # all that is done to the folder itself, which is the user's choice
    try:
        path = rng.choice(sorted(path for path in (cache, *cache.rglob("*")) if not path.is_symlink()))
        if path != cache:
            mutation = rng.choice([*OF_FILES, *OF_ANYTHING] if path.is_file() else OF_ANYTHING)
        mutation(path, rng)
    except OSError as error:  # a mutation that this state does not allow
        return f"{path}: {error}"
    return f"{path}: {getattr(mutation, '__qualname__', mutation)}"


def start_anew(cache: Path) -> None:
    cache.rename(cache.with_name(f"old-{time.monotonic_ns()}"))
    call()


def fuzz(cache: Path, seed: int, count: int) -> str:
    """Damage and call, again and again; gives how it went, or what went wrong first."""
    rng = random.Random(seed)
    refused, done = 0, list[str]()
    for _ in range(count):
        done = [damage(cache, rng) for _ in range(rng.choice([1, 1, 1, 3]))]
        start = time.monotonic()
        try:
            call()
        except MachineError as error:
            refused += 1
            if "FA_AUTOTUNE_CACHE" not in str(error):
                return f"{done}: {error}"
            start_anew(cache)  # as the message says: another folder
        except BaseException as error:  # noqa: BLE001
            return f"{done}: {type(error).__name__}: {error}"
        if time.monotonic() - start > LONGEST_CALL_S:
            return f"{done}: took {time.monotonic() - start:.1f} s"
        if len(list(cache.rglob("*"))) > 200:  # what was set aside
            start_anew(cache)
    return f"well; refused {'some' if 0 < refused < count / 5 else refused}"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for a cache that any user reaches."""
    folder = Path(mkdtemp())
    folder.chmod(0o1777)
    monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(folder / "cache"))
    yield folder / "cache"
    shutil.rmtree(folder, ignore_errors=True)


def as_this_user(action: Callable[[], str]) -> str:
    return action()


@pytest.mark.parametrize(
    ("count", "user"),
    [
        pytest.param(40, as_this_user, id="a few"),
        pytest.param(2000, as_this_user, id="many", marks=pytest.mark.rest),
        pytest.param(2000, outcome, id="many, without root", marks=pytest.mark.rest),
    ],
)
def test_every_call_gives_what_it_gave_before(
    count: int, user: Callable[[Callable[[], str]], str], cache: Path
) -> None:
    def run() -> str:
        call()
        return fuzz(cache, seed=count, count=count)

    assert user(run) == "well; refused some"
