"""Exit codes, and which error means which."""

from __future__ import annotations

from typing import Final

from flywheel.errors import (
    ConfigError,
    FlywheelError,
    InvalidProgramError,
    IrFormatError,
    MismatchError,
    NoGpuError,
    StoreError,
    TensorError,
    TooLargeError,
    UnknownNameError,
    UnsupportedModelError,
    UsageError,
    WeightsError,
)

FAILED: Final = 1
"""What no other code says: an MLflow server that cannot be reached, worker processes that die, a bug."""
DIFFERENT: Final = 1
"""`diff` only: the programs differ."""
USAGE: Final = 2
"""Options, names, configs, weights or argument files that cannot be used."""
REJECTED: Final = 3
"""Nothing feasible was found, a program or config was refused, a model does not fit the GPU, or a program computed the
wrong numbers."""
NO_GPU: Final = 4
STORE: Final = 5
ABORTED: Final = 130
"""Interrupted: after a clean drain or, at the second signal, at once."""
BROKEN_PIPE: Final = 141
"""Whoever read the output closed it; silent."""

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
    (NoGpuError, NO_GPU),
    (StoreError, STORE),
)


def exit_code(error: FlywheelError) -> int:
    """The exit code of an error, and of its subclasses."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
