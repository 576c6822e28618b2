"""A calibration: a machine's constants, fitted to measurements and frozen in a file that names their source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from flywheel.cost_model.links import Link
from flywheel.cost_model.machine import Consumer, Machine, Vector
from flywheel.cost_model.predict import MODEL_VERSION, predict_us
from flywheel.errors import IrFormatError, UsageError
from flywheel.ir import GpuTarget, MegakernelProgram
from flywheel.ir.files import parse_json, read_text
from flywheel.ir.show import show
from flywheel.measure.latency import PredictedLatency

FORMAT: Final = "flywheel-machine"
FORMAT_VERSION: Final = 5

_LINK: Final = "link"
"""The part of a machine that a file need not have."""
_LEAST: Final = 1e-6
_MOST: Final = 1e9
_MAY_BE_ZERO: Final = frozenset(
    {"poll_us", "launch_us", "data_visibility_us", "crowd_us", "restage_share", "more_copies_us",
     "chunk_us", "half_warps",
     *(field.name for field in fields(Vector))}
)  # fmt: skip
"""Constants that may be 0, since nothing is divided by them."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """The cost model with the target's own constants, or with those of a calibrated `machine`.

    `version` identifies the cost model and its constants. Predictions of different versions are never compared.
    """

    machine: Machine | None = None
    version: str = MODEL_VERSION

    def predict(self, program: MegakernelProgram) -> PredictedLatency:
        """The prediction for a validated program. Raises as `cost_model.predict`."""
        return PredictedLatency(predict_us(program, self.machine), self.version)


STOCK: Final = Predictor()
"""The cost model with the constants that come with flywheel."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted constants, and the JSON-ready `provenance`: GPU, kernels, campaigns and rows, and how well they fit."""

    machine: Machine
    provenance: Mapping[str, Any]

    @property
    def predictor(self) -> Predictor:
        """The cost model with these constants; its version names both."""
        canonical = json.dumps(constants(self.machine), sort_keys=True, separators=(",", ":"))
        return Predictor(self.machine, f"{MODEL_VERSION}+cal:{sha256(canonical.encode()).hexdigest()[:8]}")


def constants(machine: Machine) -> dict[str, Any]:
    """The constants of a machine, JSON-ready; without a link where none was probed."""
    return {name: value for name, value in asdict(machine).items() if name != _LINK or value is not None}


def dump_calibration(calibration: Calibration) -> str:
    """The file's text. The same calibration always gives the same bytes."""
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model_version": MODEL_VERSION,
        "predictor": calibration.predictor.version,
        "machine": constants(calibration.machine),
        "provenance": dict(calibration.provenance),
    }
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"


def open_predictor(path: str | Path | None, target: GpuTarget) -> Predictor:
    """The predictor of a calibration file; for None, the one that comes with flywheel.

    Raises UsageError, in one line that names the file, if the file is not for this `target` and this cost model.
    """
    if path is None:
        return STOCK
    machine = read_calibration(path).machine
    for name, found, wanted in (
        ("GPU", machine.name, target.name),
        ("num_sms", machine.num_sms, target.num_sms),
    ):
        if found != wanted:
            raise UsageError(f"{path}: calibrates {name} {found}, not {wanted}")
    return Calibration(machine, {}).predictor


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file. Raises UsageError in one line that names it."""
    try:
        document = parse_json(read_text(Path(path)))
    except IrFormatError as error:
        said = str(error)
        raise UsageError(said if said.startswith(str(path)) else f"{path}: {said}") from None
    return calibration_from_document(document, str(path))


def calibration_from_document(document: object, where: str) -> Calibration:
    """A calibration from its JSON; `where` names it in errors. Raises UsageError for anything else."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{where}: is not a {FORMAT} file; flywheel calibrate writes one")
    for name, wanted in (("version", FORMAT_VERSION), ("model_version", MODEL_VERSION)):
        if (found := document.get(name)) != wanted:
            raise UsageError(f"{where}: {name} {show(found)} is not {wanted!r}; run flywheel calibrate again")
    provenance = document.get("provenance")
    if not isinstance(provenance, dict):
        raise UsageError(f"{where}: provenance is not an object")
    calibration = Calibration(_machine(document.get("machine"), where), provenance)
    if document.get("predictor") != calibration.predictor.version:
        raise UsageError(
            f"{where}: predictor {show(document.get('predictor'))} is not that of its constants, "
            f"{calibration.predictor.version!r}: the file was edited"
        )
    return calibration


def _machine(data: object, where: str) -> Machine:
    values = _record({_LINK: None, **data} if isinstance(data, dict) else data, Machine, f"{where}: machine")
    name, source, num_sms = values["name"], values["source"], values["num_sms"]
    if not (isinstance(name, str) and name):
        raise UsageError(f"{where}: machine.name {show(name)} is not a name")
    if source not in ("measured", "scaled", "calibrated"):
        raise UsageError(f"{where}: machine.source {show(source)} is not measured, scaled or calibrated")
    if type(num_sms) is not int or not 0 < num_sms < _MOST:
        raise UsageError(f"{where}: machine.num_sms {show(num_sms)} is not a positive integer")
    parts = {
        part: kind(**_numbers(_record(values[part], kind, f"{where}: machine.{part}"), f"{where}: machine.{part}"))
        for part, kind in (("consumer", Consumer), ("vector", Vector), (_LINK, Link))
        if part != _LINK or values[_LINK] is not None
    }
    built: dict[str, Any] = {"name": name, "source": source, "num_sms": num_sms, _LINK: None, **parts}
    rest = {field: value for field, value in values.items() if field not in built}
    return Machine(**built | _numbers(rest, f"{where}: machine"))


def _record(data: object, kind: type, where: str) -> dict[str, Any]:
    wanted = {field.name for field in fields(kind)}
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not an object")
    for name in sorted(wanted ^ data.keys(), key=str):
        raise UsageError(f"{where}.{name} is {'missing' if name in wanted else 'not known'}")
    return data


def _numbers(values: Mapping[str, Any], where: str) -> dict[str, float]:
    for name, value in values.items():
        least = 0.0 if name in _MAY_BE_ZERO else _LEAST
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _MOST:
            raise UsageError(f"{where}.{name} {show(value)} is not a number in {least:g}..{_MOST:g}")
    return {name: float(value) for name, value in values.items()}
