"""The library that our operators belong to, in torch's dispatcher."""

from typing import Any

import torch

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.torch_private import take_down

_NAME = "fa_autotune"


def _made_library() -> Any:
    """Torch takes one library of a name in a process; one of modules that were purged from sys.modules goes first."""
    library: Any = torch.library
    namespace = getattr(torch.ops, _NAME)
    former = vars(namespace).get("library")
    if former is not None:
        take_down(former)
    try:
        namespace.library = library.Library(_NAME, "DEF")
    except RuntimeError as error:
        reason, *_ = str(error).splitlines()
        raise UnsupportedError(
            "fa_autotune is imported again after its modules were purged from sys.modules, and this torch can't define "
            f"its operators anew ({reason}); restart the process"
        ) from error
    return namespace.library


LIBRARY = _made_library()
