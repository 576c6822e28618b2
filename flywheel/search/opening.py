"""Opening the campaign of a search: the existing one of its name, or a new one."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import StoreError, UsageError
from flywheel.search.knowledge.shipped import shipped_starts
from flywheel.search.knowledge.warm import NEIGHBOURS, choose_starts, described
from flywheel.search.space import Space
from flywheel.search.spec import CampaignSpec, constants_of, to_campaign
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store


def open_campaign(
    spec: CampaignSpec, space: Space, store: Store, fresh: bool, predictor: str = MODEL_VERSION
) -> str:
    """The name of the campaign to run: the newest of that name, or with `fresh` a new one (`name.2`, ...).

    `predictor` is the version of the cost model that it asks.

    Raises UsageError where the campaign of that name searched something else.
    """
    while (name := _open_or_create(spec, space, store, fresh, predictor)) is None:
        pass
    return name


def _open_or_create(spec: CampaignSpec, space: Space, store: Store, fresh: bool, predictor: str) -> str | None:
    """Open or create the campaign; None if another process took the name in the meantime."""
    assert spec.name is not None
    newest, name = None, spec.name
    while (taken := store.campaign(name)) is not None:
        newest, name = taken, f"{spec.name}.{int(name[len(spec.name) + 1 :] or 1) + 1}"
    if newest is not None and not fresh:
        _check_same(newest, spec, space, predictor)
        return newest.name
    starts = choose_starts(store, space, spec.measure, predictor) if spec.seeds and spec.warm else []
    if spec.seeds and spec.warm and spec.measure == "cuda":
        starts += shipped_starts(space, NEIGHBOURS - len(starts), [start.config.config_id for start in starts])
    known = {"decoder": asdict(space.workload.spec), "predictor": predictor, **described(starts)}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    campaign = to_campaign(spec, name, created_at=now, **known)
    try:
        store.create_campaign(campaign)
    except StoreError:
        if store.campaign(campaign.name) is None:
            raise
        return None
    return campaign.name


def _check_same(campaign: Campaign, spec: CampaignSpec, space: Space, predictor: str) -> None:
    for option in ("model", "gpu", "dtype", "context", "batch", "weights", "measure"):
        before, now = getattr(campaign, option), getattr(spec, option)
        now = space.workload.stored if option == "weights" else now
        if before != now:
            raise UsageError(f"campaign {campaign.name!r} has {option}={before}, not {now}; --fresh starts a new one")
    described = json.loads(campaign.spec)
    if described.get("fix", {}) != dict(spec.fix):
        raise UsageError(f"campaign {campaign.name!r} has other pinned knobs; --fresh or --name starts a new one")
    before = described.get("predictor", MODEL_VERSION)
    if spec.measure == "predict" and constants_of(before) != constants_of(predictor):
        raise UsageError(
            f"campaign {campaign.name!r} was predicted by {before}, not {predictor}; --fresh or --name starts a new one"
        )
    decoder = described.get("decoder")
    if decoder != json.loads(json.dumps(asdict(space.workload.spec))):
        raise UsageError(f"campaign {campaign.name!r} searched another model of that name; --fresh starts a new one")
