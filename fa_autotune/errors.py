"""The tree of our exceptions.

* FaAutotuneError
    * InvalidProblemError (ValueError)    a problem, shape or tensor that no kernel of ours can serve
    * InvalidConfigError (ValueError)     a config with a value outside its domain
    * UnsupportedError (NotImplementedError)  a feature or environment that this release does not serve
    * TemplateError                       a template is missing or does not render
    * CompileError                        a generated kernel does not compile
    * LaunchError                         a compiled kernel does not load or launch
    * MachineError                        a disk, memory, the cache or another program failed; no kernel is to blame
    * WorkerError                         a job in a subprocess gave no result
        * WorkerTimeout
        * WorkerDied
    * DatabaseError                       a tuning database that can't be read or written
        * SchemaTooNewError
        * InvalidPackError                a pack holds something that is not a plain tuning record
    * NoKernelError (LookupError)         nothing in the databases, and no default, can serve a call

They are raised for wrong use and broken installs. A candidate that fails while tuning is no exception: it is a
`TrialRecord` with a `TrialStatus`.
"""


class FaAutotuneError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidProblemError(FaAutotuneError, ValueError):
    """A problem, shape or tensor that no kernel of ours can serve."""


class InvalidConfigError(FaAutotuneError, ValueError):
    """A config with a value outside its domain."""


class UnsupportedError(FaAutotuneError, NotImplementedError):
    """A feature or environment that this release does not serve."""


class TemplateError(FaAutotuneError):
    """A template is missing or does not render."""


class CompileError(FaAutotuneError):
    """A generated kernel does not compile."""


class LaunchError(FaAutotuneError):
    """A compiled kernel does not load or launch."""


class MachineError(FaAutotuneError):
    """A fault of the machine, or of its cache folder, which says nothing about a kernel."""


class WorkerError(FaAutotuneError):
    """A job in a subprocess gave no result."""


class WorkerTimeout(WorkerError):
    """A job passed its deadline; the subprocess and its children were killed."""


class WorkerDied(WorkerError):
    """The subprocess ended before it answered; `signal` is the number of the signal that ended it, if one did."""

    signal: int | None = None


class DatabaseError(FaAutotuneError):
    """A tuning database that can't be read or written."""


class SchemaTooNewError(DatabaseError):
    """A tuning database written by a newer release."""


class InvalidPackError(DatabaseError):
    """A pack that holds something else than plain tuning records."""


class NoKernelError(FaAutotuneError, LookupError):
    """Nothing in the databases, and no default, can serve a call."""
