"""Opening the campaign of a search: the existing one of its name, or a new one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import StoreError, UnsupportedModelError, UsageError
from flywheel.models.spec import DecoderSpec, spec_from_dict
from flywheel.search.knowledge.shipped import shipped_starts
from flywheel.search.knowledge.warm import NEIGHBOURS, choose_starts, described
from flywheel.search.space import Space, lost_pin, pins_of
from flywheel.search.spec import METHOD, CampaignSpec, to_campaign
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store

_WORK: Final = ("model", "gpu", "dtype", "context", "batch", "weights", "measure")

_LEARNS: Final = "learns_before"
"""The key of what `learns_before` says in the JSON of a campaign's spec."""


def resumed(spec: CampaignSpec, store: Store, fresh: bool, given: Collection[str]) -> CampaignSpec:
    """`spec` with the METHOD of the campaign that it resumes, but for the options `given`, which somebody chose."""
    assert spec.name is not None
    campaign = None if fresh else _newest(store, spec.name)[0]
    own = {} if campaign is None else _method(campaign)
    return replace(spec, **{option: value for option, value in own.items() if option not in given})


def learns_before(spec: CampaignSpec, store: Store, fresh: bool) -> str | None:
    """The time before which measurements of other works teach the campaign that `spec` opens; None where none do.

    It is now for a new campaign. One that is resumed keeps the time, so that it learns the same again.
    """
    assert spec.name is not None
    campaign = None if fresh else _newest(store, spec.name)[0]
    if campaign is not None:
        kept: str | None = json.loads(campaign.spec).get(_LEARNS)
        return kept
    return _now() if spec.seeds and spec.warm and spec.measure == "cuda" else None


def open_campaign(
    spec: CampaignSpec,
    space: Space,
    store: Store,
    fresh: bool,
    predictor: str = MODEL_VERSION,
    learns: str | None = None,
) -> str:
    """The name of the campaign to run: the newest of that name, or with `fresh` a new one (`name.2`, ...).

    `predictor` is the version of the cost model that it asks. A new campaign `learns` from what was measured before
    that time. The first run of an imported campaign decides its METHOD.

    Raises UsageError where the campaign of that name searched something else, or in another way.
    """
    while (name := _open_or_create(spec, space, store, fresh, predictor, learns)) is None:
        pass
    return name


def _newest(store: Store, name: str) -> tuple[Campaign | None, str]:
    """(the newest campaign of a name, None without one; the name of the next)."""
    newest, following = None, name
    while (taken := store.campaign(following)) is not None:
        newest, following = taken, f"{name}.{int(following[len(name) + 1 :] or 1) + 1}"
    return newest, following


def _method(campaign: Campaign) -> dict[str, Any]:
    """The METHOD of a campaign, as far as it is known: nobody has chosen an imported one's seeds and warm starts."""
    described = json.loads(campaign.spec)
    return {
        "sampler": campaign.sampler,
        "seed": campaign.seed,
        **{option: described[option] for option in METHOD if option in described},
    }


def _open_or_create(
    spec: CampaignSpec, space: Space, store: Store, fresh: bool, predictor: str, learns: str | None
) -> str | None:
    """Open or create the campaign; None if another process was faster, and took the name or decided the METHOD."""
    assert spec.name is not None
    newest, name = _newest(store, spec.name)
    if newest is not None and not fresh:
        _check_same(newest, spec, space, predictor)
        return newest.name if _decided(newest, spec, store) else None
    starts = choose_starts(store, space, spec.measure, predictor) if spec.seeds and spec.warm else []
    if spec.seeds and spec.warm and spec.measure == "cuda":
        starts += shipped_starts(space, NEIGHBOURS - len(starts), [start.config.config_id for start in starts])
    known = {"decoder": asdict(space.workload.spec), "predictor": predictor, _LEARNS: learns, **described(starts)}
    campaign = to_campaign(spec, name, created_at=_now(), **known)
    try:
        store.create_campaign(campaign)
    except StoreError:
        if store.campaign(campaign.name) is None:
            raise
        return None
    return campaign.name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _decided(campaign: Campaign, spec: CampaignSpec, store: Store) -> bool:
    """Make the METHOD of the first run of an imported campaign the campaign's. Whether no other process was faster."""
    described = json.loads(campaign.spec)
    if not described.keys().isdisjoint(METHOD):
        return True
    described |= {option: getattr(spec, option) for option in METHOD}
    decided = replace(campaign, sampler=spec.sampler, seed=spec.seed, spec=json.dumps(described, sort_keys=True))
    return store.replace_campaign(campaign, decided)


def _check_same(campaign: Campaign, spec: CampaignSpec, space: Space, predictor: str) -> None:
    described = json.loads(campaign.spec)
    pairs = [(option, getattr(campaign, option), getattr(spec, option)) for option in _WORK]
    pairs += [(option, described[option], getattr(spec, option)) for option in METHOD if option in described]
    for option, before, now in pairs:
        wanted = space.workload.stored if option == "weights" else now
        if before != wanted:
            raise _another(campaign, f"has {option}={before}, not {wanted}")
    lost, pinned = lost_pin(campaign), pins_of(campaign)
    if lost is not None:
        raise _another(campaign, f"has {lost}")
    if pinned != dict(spec.fix):
        raise _another(campaign, f"has {_pins(pinned)}; this search has {_pins(spec.fix)}")
    before = described.get("predictor", MODEL_VERSION)
    if spec.measure == "predict" and before != predictor:
        raise _another(campaign, f"was predicted by {before}, not {predictor}")
    if not _is_of(described.get("decoder"), space.workload.spec):
        raise _another(campaign, "searched another model of that name")


def _is_of(decoder: Mapping[str, Any] | None, spec: DecoderSpec) -> bool:
    try:
        return decoder is not None and spec_from_dict(decoder) == spec
    except (TypeError, UnsupportedModelError):  # written by another version
        return False


def _pins(fix: Mapping[str, str]) -> str:
    return " and ".join(f"--fix {knob}={value}" for knob, value in sorted(fix.items())) or "no --fix"


def _another(campaign: Campaign, fact: str) -> UsageError:
    return UsageError(f"campaign {campaign.name!r} {fact}; --fresh or --name starts a new one")
