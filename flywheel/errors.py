"""The whole exception tree. Each message is one line: the object, the fact, the bound."""

from __future__ import annotations

from pathlib import Path


class FlywheelError(Exception):
    """Base of every error that flywheel raises on purpose."""


class IrFormatError(FlywheelError):
    """A program, config or target file is not in the IR's format."""


class InvalidProgramError(FlywheelError):
    """A program that must be valid was rejected by the validator."""


class ConfigError(FlywheelError):
    """A ScheduleConfig holds a value that no lowering can honour on this target."""


class TooLargeError(FlywheelError):
    """A decode step does not fit the memory of its GPU."""


class UnknownNameError(FlywheelError):
    """No model, GPU, sampler, knob or campaign has this name."""


class UnsupportedModelError(FlywheelError):
    """A checkpoint's configuration cannot be represented exactly."""


class WeightsError(FlywheelError):
    """A tensor is missing, unknown, misshapen or unreadable, or weights do not fit a program."""


class UsageError(FlywheelError):
    """Options that contradict each other or the campaign they name."""


class ContextError(UsageError):
    """A prompt and the tokens that are asked for behind it do not fit the context."""


class RequestError(UsageError):
    """The tokenizer or the chat template of a model refuses a text or a conversation. Its files are fine."""


class TokenizerError(UsageError):
    """A file of a tokenizer is at fault, or ends the library that reads it. `fault` is the message without the
    checkpoint's directory, which is the file's unless `folder` is given."""

    def __init__(self, file: Path, why: str, folder: Path | None = None) -> None:
        super().__init__(f"{str(file)!r}: {why}")
        self.file, self.why, self._folder = file, why, folder
        self.fault = f"{file.relative_to(folder or file.parent)}: {why}"

    def __reduce__(self) -> tuple[type[TokenizerError], tuple[Path, str, Path | None]]:
        return type(self), (self.file, self.why, self._folder)


class BundleError(UsageError):
    """A bundle is damaged, of another format, or not for this GPU, driver or these weights."""


class NoGpuError(FlywheelError):
    """The GPU that the work needs is not on this machine."""


class WorkerDiedError(FlywheelError):
    """A process or machine that evaluates trials is gone, with whatever it was doing."""


class ClusterGoneError(FlywheelError):
    """The Ray cluster that evaluates trials does not answer."""


class OutputError(FlywheelError):
    """Not all of the result could be written to stdout, or a line to stderr."""


class StoreError(FlywheelError):
    """The trial store cannot be opened, read or written."""


class MirrorError(FlywheelError):
    """The MLflow server, or the file that stands for one, cannot be reached, read or written."""


class TrialExistsError(StoreError):
    """A campaign has a trial of this number already: another process searches it too."""


class TensorError(FlywheelError):
    """A tensor is missing, not asked for, or not of the shape, type or values that a buffer holds."""


class MismatchError(FlywheelError):
    """A program computed something else than the oracle."""


class NonFiniteError(FlywheelError):
    """Numbers of a computation are NaN or infinite. The message names their position, layer and tensor where known."""


class TraceError(FlywheelError):
    """Stamps of a traced launch are absent, or not in the order in which a task passes them."""


class KernelCompileError(FlywheelError):
    """The kernel does not compile for an architecture, or there is no compiler."""


class GpuMemoryError(FlywheelError):
    """The GPU has less free memory than was asked for."""


class CacheMemoryError(GpuMemoryError):
    """KV caches do not grow as far as a sequence needs them: the memory is others'."""


class GpuFaultError(FlywheelError):
    """A launch broke the GPU's context, or cannot be stopped: only a new process can use the GPU again."""


class LaunchTimeoutError(FlywheelError):
    """A launch did not end within `limit_s` and was stopped; the GPU is fine."""

    def __init__(self, message: str, limit_s: float) -> None:
        super().__init__(message)
        self.limit_s = limit_s

    def __reduce__(self) -> tuple[type[LaunchTimeoutError], tuple[str, float]]:
        return type(self), (str(self), self.limit_s)
