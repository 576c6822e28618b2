from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from flywheel.cli.provenance import search_command
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.store.campaign import Campaign


def campaign(spec: CampaignSpec) -> Campaign:
    settled = with_name(spec, "predict")
    assert settled.name is not None
    return Campaign(
        name=settled.name, model=spec.model, gpu=spec.gpu, dtype=spec.dtype, context=spec.context, measure="predict",
        sampler=spec.sampler, seed=spec.seed, spec=json.dumps({**asdict(settled), "decoder": {}}),
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
    common = "flywheel search --model m --gpu h100 --dtype bf16 --context 512 --measure predict --sampler tpe --seed 0"
    assert search_command(campaign(spec)) == f"{common} --trials 120{tail}"
