"""`flywheel models` and `flywheel targets`: the models and GPUs known by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

import click

from flywheel.cli.options import DEFAULTS, SharedOption, command, document_option, give, json_option, weights_option
from flywheel.cli.text import show, show_table, size, us
from flywheel.cost_model import machine_for
from flywheel.ir import TARGETS, DType, GpuTarget
from flywheel.ir.writing import target_to_dict
from flywheel.models.catalog import CATALOG
from flywheel.models.config_keys import keys_of
from flywheel.models.config_reading import shown
from flywheel.models.decoder import DTYPES
from flywheel.models.families import FAMILIES, count_params
from flywheel.models.family import Family
from flywheel.models.footprint import bytes_per_token
from flywheel.models.formats import WeightFormats, parse_formats, weights_name
from flywheel.models.spec import DecoderSpec
from flywheel.models.unsupported import UNSUPPORTED
from flywheel.search.workload import find_target

_WIDTH: Final = 100
"""Of lines of a list."""


@command
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Add the weight floor on this GPU; repeatable.")
@click.option("--dtype", cls=SharedOption, type=click.Choice(list(DTYPES)), metavar="bf16|f16|f32",
              default=DEFAULTS["dtype"], show_default=True,
              help="Type of activations and unquantised weights.")  # fmt: skip
@weights_option
@click.option("--family", "by_family", is_flag=True, help="List instead the families of checkpoints that run, the keys "
              "of their config.json, and what is refused and why.")
@document_option
@json_option
def models(
    gpus: tuple[str, ...], dtype: str, weights: str | None, by_family: bool, output: Path | None, as_json: bool
) -> None:
    """List the models known by name.

    The floor is the time that reading a token's weights takes at the GPU's bandwidth.
    """
    if by_family:
        families = {"families": [*map(_family, FAMILIES.values())], "refused": dict(UNSUPPORTED)}
        give(families, output, as_json, lambda: _show_families(families))
        return
    targets = [find_target(gpu) for gpu in gpus]
    stored = weights_name(weights, dtype)
    formats = parse_formats(stored, dtype)
    listed = [_model(spec, DTYPES[dtype], formats, targets) for spec in CATALOG.values()]
    document = {"dtype": dtype, "weights": stored, "models": listed}
    give(document, output, as_json, lambda: _show_models(stored, listed, targets))


def _show_models(stored: str, listed: list[dict[str, Any]], targets: list[GpuTarget]) -> None:
    headers = ("<!model", "params", "?layers", "?hidden", "?heads", "?KV", "?vocab", "max context",
               f"{stored} read a token",
               *(f"{target.name} floor" for target in targets))  # fmt: skip
    rows = [
        (
            model["name"], f"{model['params'] / 1e9:.2f} B", str(model["layers"]), f"{model['hidden']:,}",
            str(model["heads"]), str(model["kv_heads"]), f"{model['vocab']:,}", f"{model['max_context']:,}",
            size(model["bytes_per_token"]), *(us(floor) for floor in model["floor_us"].values()),
        )
        for model in listed
    ]  # fmt: skip
    show_table(headers, rows)


def _family(rules: Family) -> dict[str, Any]:
    keys = keys_of(rules)
    return {
        "model_type": rules.name,
        "architecture": rules.architecture,
        "models": [spec.name for spec in CATALOG.values() if spec.family == rules.name],
        "keys": {
            "used": sorted(keys.used),
            "refused_but": {key: list(values) for key, values in sorted(keys.refused.items())},
            "told_but": {key: list(values) for key, values in sorted(keys.foreign.items())},
            "irrelevant": sorted(keys.irrelevant),
        },
    }


def _show_families(document: Mapping[str, Any]) -> None:
    families = document["families"]
    counts = Counter(key for each in families for key in each["keys"]["used"])
    usual = [key for key, count in counts.items() if 2 * count > len(families)]
    show_table(("<!model_type", "<architecture", "<models by name"), [
        (each["model_type"], each["architecture"], ", ".join(each["models"]) or "-") for each in families
    ])  # fmt: skip
    show("", "keys of config.json that most families read")
    _show_list("", sorted(usual))
    show("", "keys that some read besides")
    for each in families:
        if own := [key for key in each["keys"]["used"] if key not in usual]:
            _show_list(f"{each['model_type']}: ", own)
    refused = {key: values for each in families for key, values in each["keys"]["refused_but"].items()}
    show("", "keys that are refused, but for the value in brackets; others that ask for something are told")
    _show_list("", [f"{key} ({' or '.join(map(shown, values))})" if values else key for key, values in refused.items()])
    reasons: dict[str, list[str]] = {}
    for name, why in document["refused"].items():
        reasons.setdefault(why, []).append(name)
    show("", "kinds of models that are refused, and why")
    for why, names in reasons.items():
        _show_list(f"{why}: ", names)


def _show_list(head: str, items: Sequence[str]) -> None:
    show(*wrap(head + ", ".join(items), _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))


@command
@document_option
@json_option
def targets(output: Path | None, as_json: bool) -> None:
    """List the GPUs known by name."""
    documents = [{**target_to_dict(target), "cost_model": machine_for(target).source} for target in TARGETS.values()]
    give({"targets": documents}, output, as_json, _show_targets)


def _show_targets() -> None:
    headers = ("<!GPU", "arch", "SMs", "HBM", "GB/s", "?L2", "?smem a block", "<cost model", "?<source")
    rows = [
        (
            target.name, f"sm_{target.sm_arch}", str(target.num_sms), f"{target.hbm_bytes / 2**30:.0f} GiB",
            f"{target.hbm_bandwidth_gbs:,.0f}", f"{target.l2_bytes / 2**20:.0f} MiB",
            f"{target.smem_bytes_per_block_optin / 1024:.0f} KiB", machine_for(target).source, target.note,
        )
        for target in TARGETS.values()
    ]  # fmt: skip
    show_table(headers, rows)


def _model(spec: DecoderSpec, dtype: DType, formats: WeightFormats, targets: list[GpuTarget]) -> dict[str, Any]:
    nbytes = bytes_per_token(spec, dtype, formats)
    return {
        "name": spec.name,
        "family": spec.family,
        "params": count_params(spec),
        "layers": spec.n_layers,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "heads": spec.n_heads,
        "kv_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "vocab": spec.vocab,
        "max_context": spec.max_position,
        "tied_head": spec.tied_head,
        "bytes_per_token": nbytes,
        "floor_us": {target.name: target.bandwidth_bound_us(nbytes) for target in targets},
    }
