from __future__ import annotations

import json
import shlex
from dataclasses import asdict, fields, replace

import pytest

from flywheel.cli.search import search
from flywheel.search.provenance import search_command
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.store.campaign import Campaign


def campaign(spec: CampaignSpec) -> Campaign:
    settled = with_name(spec, "predict")
    assert settled.name is not None
    return Campaign(
        name=settled.name, model=spec.model, gpu=spec.gpu, dtype=spec.dtype, context=spec.context, batch=spec.batch,
        measure="predict", sampler=spec.sampler, seed=spec.seed, spec=json.dumps({**asdict(settled), "decoder": {}}),
        created_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "tail"),
    [
        (CampaignSpec("m", "h100"), ""),
        (CampaignSpec("m", "h100", time_s=90.0, until=0.9), " --time 90.0 --until 0.9"),
        (CampaignSpec("m", "h100", seeds=False, jobs=1), " --jobs 1 --no-seeds"),
        (CampaignSpec("m", "h100", warm=False), " --cold"),
        (CampaignSpec("m", "h100", fix={"depth": "2", "chunk": "4096"}, name="a b"),
         " --fix chunk=4096 --fix depth=2 --name 'a b'"),
    ],
)  # fmt: skip
def test_the_command_of_a_campaign_states_what_was_asked(spec: CampaignSpec, tail: str) -> None:
    common = "flywheel search --model m --gpu h100 --dtype bf16 --context 512 --measure predict"
    assert search_command(campaign(spec)) == f"{common} --sampler descent --seed 0 --trials 120{tail}"


def test_the_command_of_a_campaign_that_went_on_asks_for_all_of_its_trials() -> None:
    assert "--trials 400" in search_command(campaign(CampaignSpec("m", "h100")), 400)
    assert "--trials 120" in search_command(campaign(CampaignSpec("m", "h100")), 7)


def test_every_field_of_a_campaign_is_an_option_of_the_command() -> None:
    base = CampaignSpec("m", "h100")
    others: dict[type, object] = {int: 7, float: 1.0, str: "x", bool: False}
    changed: dict[str, object] = {"fix": {"depth": "2"}, "engine": "ray", "ray_address": "head:6379", "measure": "cuda"}
    kinds = {"int": int, "int | None": int, "float | None": float, "str": str, "str | None": str, "bool": bool}
    for field in fields(CampaignSpec):
        changed.setdefault(field.name, others[kinds[str(field.type)]] if str(field.type) in kinds else None)
    spec = replace(base, **{name: value for name, value in changed.items() if value is not None})  # type: ignore[arg-type]
    words = shlex.split(search_command(campaign(spec)))
    known = {flag for option in search.params for flag in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
    assert "--ray-address" in words
