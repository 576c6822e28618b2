"""The exit codes, and the code of each error."""

from __future__ import annotations

from typing import Final

from flywheel.errors import (
    ConfigError,
    FlywheelError,
    InvalidProgramError,
    IrFormatError,
    MismatchError,
    NoGpuError,
    NonFiniteError,
    StoreError,
    TensorError,
    TooLargeError,
    UnknownNameError,
    UnsupportedModelError,
    UsageError,
    WeightsError,
)

FAILED: Final = 1
"""All other failures: an MLflow server that cannot be reached, worker processes that die, a bug."""
DIFFERENT: Final = 1
"""`diff` only: the programs differ."""
USAGE: Final = 2
"""Unusable options, names, configs, weights or argument files."""
REJECTED: Final = 3
"""A search found nothing feasible, a program or config was refused, a model does not fit the GPU, or a program computed
wrong numbers."""
NO_GPU: Final = 4
STORE: Final = 5
ABORTED: Final = 130
"""Interrupted: after a clean drain, or at once by a second signal."""
BROKEN_PIPE: Final = 141
"""The reader of the output closed it. No message is written."""

_CODES: Final = (
    (UsageError, USAGE),
    (UnknownNameError, USAGE),
    (ConfigError, USAGE),
    (UnsupportedModelError, USAGE),
    (IrFormatError, USAGE),
    (WeightsError, USAGE),
    (TensorError, USAGE),
    (InvalidProgramError, REJECTED),
    (TooLargeError, REJECTED),
    (MismatchError, REJECTED),
    (NonFiniteError, REJECTED),
    (NoGpuError, NO_GPU),
    (StoreError, STORE),
)


def exit_code(error: FlywheelError) -> int:
    """The exit code of an error, by its class in `_CODES`, else FAILED."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
