"""`flywheel doctor`: what this machine has, and what flywheel can do with it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flywheel.cli.options import command, json_option, store_option
from flywheel.cli.text import note, pairs, percent, show, show_json
from flywheel.errors import StoreError
from flywheel.installing import install_line
from flywheel.measure.device import GENERIC

if TYPE_CHECKING:
    from flywheel.measure.device import Device
    from flywheel.measure.environment import Environment

DEPENDENCIES: Final = ("optuna", "sqlalchemy", "alembic", "click", "rich", "numba", "numpy", "threadpoolctl")
EXTRAS: Final = {
    "torch": ("torch",),
    "hf": ("huggingface-hub", "jinja2", "safetensors", "tokenizers"),
    "serve": ("fastapi", "prometheus-client", "uvicorn"),
    "samplers": ("cmaes", "scipy", "torch"),
    "pandas": ("pandas",),
    "postgres": ("psycopg",),
    "mlflow": ("mlflow",),
    "ray": ("ray",),
    "cuda": ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "nvidia-ml-py"),
    "cuda12": ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc-cu12", "nvidia-ml-py"),
}
"""Extra -> the packages that it installs."""


@command
@click.option("--probe", is_flag=True,
              help="Measure and store the GPU's read rate, its hand-off time, and its links to other GPUs.")
@store_option
@json_option
def doctor(probe: bool, store: str, as_json: bool) -> None:  # fmt: skip
    """Show what this machine has: Python, packages, GPU and store. Exits 0 whatever it finds.

    With --probe it first measures the GPU for some seconds: the best rate at which plain kernels read its memory, and
    the time of a hand-off between two SMs. Where this machine has more GPUs, it also measures the link between the
    first GPU and each other one. Exit code 4 if there is no GPU to probe.
    """
    from flywheel.measure.environment import capture_environment
    from flywheel.search.trials.device import missing_modules

    environment = capture_environment()
    if probe:
        _probe(store, environment)
    report: dict[str, Any] = {
        "environment": asdict(environment),
        "dependencies": {name: _version(name) for name in DEPENDENCIES},
        "extras": {extra: [name for name in packages if _version(name) is None] for extra, packages in EXTRAS.items()},
        "gpu": {
            "name": environment.gpu,
            "driver": environment.driver,
            "target": _match(environment.device),
            "missing": missing_modules(),
        },
        "presence": _presences(),
        "store": _store(store, environment.gpu),
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


def _match(device: Device | None) -> str | None:
    """The name of the GPU's record: its datasheet's, else a generic one where the driver can be asked."""
    from flywheel.errors import NoGpuError
    from flywheel.measure.device import target_of
    from flywheel.vm.gpu.devices import describe_gpu

    if device is None:
        return None
    try:
        device, seen = describe_gpu()
    except NoGpuError:
        found = target_of(device)
        return None if found is None else found.name
    return (target_of(device) or seen).name


def _presences() -> list[dict[str, Any]]:
    """Who is on each GPU, and what it does now. `processes` is null if the driver does not tell."""
    from flywheel.measure.environment import list_gpus
    from flywheel.vm.gpu.nvml import read_presence

    found = []
    for gpu, device in list_gpus():
        presence = asdict(read_presence(gpu, at_work=False))
        others = presence.pop("others")
        del presence["mixed"], presence["strangers"]
        processes = None if others is None else list(others)
        found.append({"gpu": gpu, "name": device.name, **presence, "processes": processes})
    return found


def _probe(url: str, environment: Environment) -> None:
    """Measure the GPU and its links, and store the numbers. Raises as `open_gpu`, `probe` and `open_store`."""
    from flywheel.measure.ceiling import Ceiling, PeerLink
    from flywheel.store.sql import open_store
    from flywheel.vm.gpu.driver import open_gpu
    from flywheel.vm.gpu.link_probes import probe_links
    from flywheel.vm.gpu.probes import probe

    gpu = open_gpu()
    with open_store(url) as store:
        note(f"flywheel: probing {gpu.name}")
        found = probe(gpu)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        where = gpu.name, environment.driver, environment.host
        store.append_ceiling(Ceiling(*where, **asdict(found), created_at=now))
        for each in probe_links(gpu, lambda told: note(f"flywheel: {told}")):
            store.append_link(PeerLink(*where, **asdict(each), created_at=now))


def _store(url: str, gpu: str | None) -> dict[str, Any]:
    """The store's state and its probe of the GPU. Does not create the store."""
    from flywheel.store.places import make_store_url, store_name
    from flywheel.store.schema import SCHEMA_VERSION
    from flywheel.store.sql import open_store

    found: dict[str, Any] = {
        "name": None, "exists": False, "writable": None, "schema_version": None, "campaigns": None, "trials": None,
        "problem": None, "ceiling": None, "links": [],
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
            ceiling = None if gpu is None else store.ceiling(gpu)
            links = [] if gpu is None else store.links(gpu)
    except StoreError as error:
        return {**found, "problem": str(error)}
    trials = sum(summary.trials for summary in summaries)
    return {
        **found, "exists": True, "schema_version": SCHEMA_VERSION, "campaigns": len(summaries), "trials": trials,
        "ceiling": None if ceiling is None else asdict(ceiling), "links": [asdict(each) for each in links],
    }  # fmt: skip


def _show(report: dict[str, Any]) -> None:
    environment, gpu, store = report["environment"], report["gpu"], report["store"]
    missing = [name for name, found in report["dependencies"].items() if found is None]
    packages = ", ".join(f"{name} {found}" for name, found in report["dependencies"].items() if found)
    lines = [
        ("flywheel", f"{environment['flywheel_version']}, IR {environment['ir_version']}"
                     + (f", commit {environment['commit']}" if environment["commit"] else "")),
        ("python", f"{environment['python']} on {platform.platform(terse=True)}, {environment['cpu_count']} CPUs"),
        ("packages", packages),
        ("missing", ", ".join(missing) + f"; {install_line()}" if missing else None),
        *((f"[{extra}]", "installed" if not absent else f"not installed ({', '.join(absent)} missing)")
          for extra, absent in report["extras"].items()),
        ("GPU", _gpu_line(gpu)),
        *(("on it", _presence_line(presence)) for presence in report["presence"]),
        ("measured", _ceiling_line(gpu, store["ceiling"])),
        *(("link", _link_line(link)) for link in store["links"]),
        ("store", _store_line(store)),
    ]  # fmt: skip
    show(*pairs(lines, indent=""))


def _gpu_line(gpu: dict[str, Any]) -> str:
    if gpu["name"] is None:
        return "none that nvidia-smi knows: latencies are predicted by the cost model"
    target = f"--gpu {gpu['target']}" if gpu["target"] else "none of the known GPUs (flywheel targets)"
    if gpu["target"] and gpu["target"].startswith(GENERIC):
        target += ", a record of what its driver says, for want of a datasheet"
    if gpu["missing"]:
        target += (
            f"; latencies are predicted until {install_line('cuda', 'torch')} ({', '.join(gpu['missing'])} missing)"
        )
    return f"{gpu['name']}, driver {gpu['driver']}: {target}"


def _presence_line(presence: dict[str, Any]) -> str:
    """The line that says who is on a GPU, and what it does."""
    from flywheel.measure.tenants import Tenant, named

    processes = presence["processes"]
    who = "the driver does not tell who"
    if processes is not None:
        who = named([Tenant(**each) for each in processes]) or "no process that the driver lists"
    facts = [
        None if presence["free_bytes"] is None
        else f"{presence['free_bytes']:,} of {presence['total_bytes']:,} bytes free",
        None if presence["utilisation_percent"] is None else f"{presence['utilisation_percent']} % busy",
        None if presence["sm_clock_mhz"] is None
        else f"clocks {presence['sm_clock_mhz']} and {presence['mem_clock_mhz']} MHz",
        None if presence["throttle"] in (None, "none") else f"held down by {presence['throttle']}",
    ]  # fmt: skip
    return "; ".join([f"{presence['name']}: {who}", *filter(None, facts)])


def _ceiling_line(gpu: dict[str, Any], ceiling: dict[str, Any] | None) -> str | None:
    """The line that says what a probe measured on this card."""
    from flywheel.search.workload import find_target

    if gpu["name"] is None:
        return None
    if ceiling is None:
        return "nothing yet of what this GPU can do; flywheel doctor --probe"
    of = ""
    if gpu["target"] is not None:
        of = f" ({percent(ceiling['read_gbs'] / find_target(gpu['target']).hbm_bandwidth_gbs)} of the datasheet's)"
    return (
        f"reads {ceiling['read_gbs']:,.0f} GB/s{of} with {ceiling['read_kernel']}; "
        f"a hand-off takes {ceiling['hand_off_us']:.2f} us"
    )


def _link_line(link: dict[str, Any]) -> str:
    """The line that says what a probe measured of a pair of GPUs."""
    return (
        f"GPU 0 and GPU {link['peer']}: 512 bytes take {link['one_way_us']:.2f} us to the other GPU, polled, and "
        f"{link['same_gpu_us']:.2f} us to another SM; copies {link['to_gbs']:,.0f} GB/s there and "
        f"{link['from_gbs']:,.0f} back at once"
    )


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
