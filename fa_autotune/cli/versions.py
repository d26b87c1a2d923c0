"""Which release of a package is installed, under whichever name it is distributed; nothing is imported for it."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm"),
    "optuna": ("optuna",),
    "sqlite-utils": ("sqlite-utils",),
}


def installed_version(package: str) -> str | None:
    """The version of one of PACKAGES, None where it is not installed."""
    return next(filter(None, map(_distribution_version, PACKAGES[package])), None)


def _distribution_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
