"""The files of compiled kernels: kept with their checksums, and never read where they are not what was written.

Triton keeps a kernel's stages, its binary and what it needs to launch it in a folder of its own for each kernel, and
reads them as they are. This is what it asks instead: a file that is damaged, too long, a link, or of unknown origin is
not there, so the kernel is compiled anew.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from fa_autotune.files import read_plain, write_whole
from fa_autotune.paths import own_cache_folder, triton_cache_dir

CHECKSUMS = "checksums.json"
MAX_FILE_BYTES = 2**26  # binaries and texts of our kernels take a few megabytes at most
_MAX_CHECKSUMS_BYTES = 2**16


class CompiledFiles:
    """The files of one kernel, as Triton's cache manager; `key` is Triton's, of source, options, target and release.

    MachineError where another user could have put files there; OSError where they can't be written.
    """

    def __init__(self, key: str) -> None:
        self._folder = own_cache_folder(triton_cache_dir() / key)

    def has_file(self, filename: str) -> bool:
        """Whether a file is there as it was put."""
        return self.get_file(filename) is not None

    def get_file(self, filename: str) -> str | None:
        """The path of a file that is as it was put."""
        return str(self._folder / filename) if self._content(filename) is not None else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Keep bytes, or what has a text; gives its path."""
        content = data if isinstance(data, bytes) else str(data).encode()
        path = self._folder / filename
        write_whole(path, content, durable=False, mode=0o600)
        sums = json.dumps({**self._checksums(), filename: sha256(content).hexdigest()})
        write_whole(self._folder / CHECKSUMS, sums, durable=False, mode=0o600)
        return str(path)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of files that belong together, by name, if all of them are as they were put."""
        names = _parsed(self._content(_group(filename)), list)
        if names is None or filename not in names:
            return None
        paths = {name: self.get_file(name) for name in names if isinstance(name, str)}
        found = {name: path for name, path in paths.items() if path is not None}
        return found if len(found) == len(names) else None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Say which files belong together, each of which was put."""
        return self.put(json.dumps(sorted(group)), _group(filename), binary=False)

    def _content(self, filename: str) -> bytes | None:
        if Path(filename).name != filename or (expected := self._checksums().get(filename)) is None:
            return None
        content = read_plain(self._folder / filename, at_most=MAX_FILE_BYTES)
        return content if content is not None and sha256(content).hexdigest() == expected else None

    def _checksums(self) -> dict[str, Any]:
        return _parsed(read_plain(self._folder / CHECKSUMS, at_most=_MAX_CHECKSUMS_BYTES), dict) or {}


def _group(filename: str) -> str:
    return f"__grp__{filename}"


def _parsed(content: bytes | None, kind: type[Any]) -> Any:
    try:
        value = json.loads(content or b"null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None
