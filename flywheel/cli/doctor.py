"""`flywheel doctor`: what is here, and what can be done with it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from flywheel.cli.options import command, json_option, store_option
from flywheel.cli.text import pairs, show, show_json
from flywheel.errors import StoreError

DEPENDENCIES: Final = ("optuna", "sqlalchemy", "alembic", "click", "rich", "numpy")
EXTRAS: Final = {
    "torch": ("torch",),
    "hf": ("safetensors", "tokenizers"),
    "samplers": ("cmaes", "scipy", "torch"),
    "postgres": ("psycopg",),
    "plots": ("matplotlib",),
}
"""Extra -> the modules that it installs."""


@command
@store_option
@json_option
def doctor(store: str, as_json: bool) -> None:
    """Say what this machine has: Python, packages, GPU and store. Exits 0 whatever it finds."""
    from flywheel.measure.environment import capture_environment

    environment = capture_environment()
    report: dict[str, Any] = {
        "environment": asdict(environment),
        "dependencies": {name: _version(name) for name in DEPENDENCIES},
        "extras": {
            extra: [module for module in modules if find_spec(module) is None] for extra, modules in EXTRAS.items()
        },
        "gpu": {"name": environment.gpu, "driver": environment.driver, "target": _match(environment.gpu)},
        "store": _store(store),
    }
    if as_json:
        show_json(report)
    else:
        _show(report)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _match(gpu: str | None) -> str | None:
    from flywheel.ir import TARGETS
    from flywheel.search.device import is_target

    if gpu is None:
        return None
    return next((name for name, target in TARGETS.items() if is_target(gpu, target)), None)


def _store(url: str) -> dict[str, Any]:
    """Its state, without creating it."""
    from flywheel.store.engine import make_store_url, store_name
    from flywheel.store.schema import SCHEMA_VERSION
    from flywheel.store.sql import open_store

    found: dict[str, Any] = {
        "name": None, "exists": False, "writable": None, "schema_version": None, "campaigns": None, "trials": None,
        "problem": None,
    }  # fmt: skip
    try:
        where = make_store_url(url)
        found["name"] = store_name(where)
        if where.get_backend_name() == "sqlite" and where.database:
            path = Path(where.database)
            found["writable"] = os.access(path if path.exists() else path.resolve().parent, os.W_OK)
            if not path.exists() and path.resolve().parent.is_dir():
                return found
        with open_store(url, create=False) as store:
            summaries = store.campaigns()
    except StoreError as error:
        return {**found, "problem": str(error)}
    trials = sum(summary.trials for summary in summaries)
    return {
        **found, "exists": True, "schema_version": SCHEMA_VERSION, "campaigns": len(summaries), "trials": trials,
    }  # fmt: skip


def _show(report: dict[str, Any]) -> None:
    environment, gpu, store = report["environment"], report["gpu"], report["store"]
    missing = [name for name, found in report["dependencies"].items() if found is None]
    packages = ", ".join(f"{name} {found}" for name, found in report["dependencies"].items() if found)
    lines = [
        ("flywheel", f"{environment['flywheel_version'] or 'never installed'}, IR {environment['ir_version']}"
                     + (f", commit {environment['commit']}" if environment["commit"] else "")),
        ("python", f"{environment['python']} on {platform.platform(terse=True)}, {environment['cpu_count']} CPUs"),
        ("packages", packages),
        ("missing", ", ".join(missing) + "; pip install flywheel" if missing else None),
        *((f"[{extra}]", "installed" if not absent else f"not installed ({', '.join(absent)} missing)")
          for extra, absent in report["extras"].items()),
        ("GPU", _gpu_line(gpu)),
        ("store", _store_line(store)),
    ]  # fmt: skip
    show(pairs(lines, indent=""))


def _gpu_line(gpu: dict[str, Any]) -> str:
    if gpu["name"] is None:
        return "none that nvidia-smi knows: latencies are predicted by the cost model"
    target = f"--gpu {gpu['target']}" if gpu["target"] else "none of the known GPUs (flywheel targets)"
    return f"{gpu['name']}, driver {gpu['driver']}: {target}; this version has no CUDA VM, so latencies are predicted"


def _store_line(store: dict[str, Any]) -> str:
    if store["problem"]:
        return f"PROBLEM: {store['problem']}"
    if not store["exists"]:
        able = "; search creates it" if store["writable"] else ", and its directory is not writable"
        return f"{store['name']}: not there yet{able}"
    writable = ", not writable" if store["writable"] is False else ""
    return (
        f"{store['name']}: schema {store['schema_version']}, campaigns {store['campaigns']:,}, "
        f"trials {store['trials']:,}{writable}"
    )
