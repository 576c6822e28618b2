"""The command lines that make a row, and the search for campaigns by name."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import UnknownNameError
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import trials_of
from flywheel.search.knobs import REMOVED
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.store.schedule import Shipped, dump_schedule, schedule_document

if TYPE_CHECKING:
    from flywheel.store.campaign import Campaign
    from flywheel.store.sql import Store

_ALWAYS: Final = ("model", "gpu", "dtype", "context", "measure", "sampler", "seed", "trials")
"""Options that a campaign's command states even at their defaults."""


def find_campaign(store: Store, name: str | None) -> Campaign:
    """The campaign of that name, or the only one whose name starts with it; for None, the newest.

    Raises StoreError, and UnknownNameError with the closest names.
    """
    campaign = None if name is None else store.campaign(name)
    if campaign is not None:
        return campaign
    known = [summary.campaign for summary in store.campaigns()]
    if name is None:
        if not known:
            raise UnknownNameError(f"store {store.name}: no campaigns; flywheel search makes one")
        return known[-1]
    begun = [campaign for campaign in known if name and campaign.name.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    names = [campaign.name for campaign in begun or known]
    if begun:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise UnknownNameError(f"store {store.name}: the names of {len(begun)} campaigns begin with {name!r}: {shown}")
    close = get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "flywheel campaigns lists them"
    raise UnknownNameError(f"store {store.name}: no campaign {name!r}; {hint}")


def search_command(campaign: Campaign, trials: int = 0) -> str:
    """The command line that runs the campaign in a store without it: as first asked for, up to the number of `trials`
    that it has, if that is more."""
    described = json.loads(campaign.spec)
    known = {field.name: field.default for field in fields(CampaignSpec)}
    columns = {name: getattr(campaign, name) for name in ("model", "gpu", "sampler", "seed")}
    spec = CampaignSpec(**columns | {name: value for name, value in described.items() if name in known})
    pinned = {knob: value for knob, value in spec.fix.items() if knob not in REMOVED or REMOVED[knob].value != value}
    spec = replace(spec, trials=max(spec.trials, trials), fix=pinned)  # what searches do anyway need not be said
    words = ["flywheel", "search"]
    for name, default in known.items():
        value = getattr(spec, name)
        if name == "fix":
            words += [word for knob, setting in sorted(value.items()) for word in ("--fix", f"{knob}={setting}")]
        elif name == "name":
            predictor = described.get("predictor", MODEL_VERSION)
            named = with_name(replace(spec, name=None), spec.measure, predictor).name != value
            words += ["--name", str(value)] if named else []
        elif name == "seeds":
            words += [] if value else ["--no-seeds"]
        elif name == "warm":
            words += [] if value else ["--cold"]
        elif name in _ALWAYS or (value != default and value is not None):
            words += [f"--{name.removesuffix('_s').replace('_', '-')}", str(value)]
    return shlex.join(words)


def lower_command(record: TrialRecord) -> str:
    """The command line that lowers the row's exported schedule, best.json, to its program."""
    words = ["flywheel", "lower", "--model", record.model, "--gpu", record.gpu, "--dtype", record.dtype]
    words += [] if record.weights in (None, record.dtype) else ["--weights", record.weights]
    words += ["--context", str(record.context), *(["--batch", str(record.batch)] if record.batch > 1 else [])]
    words += ["--config", "best.json"]
    return shlex.join(words)


def stored_text(record: TrialRecord, store: Store) -> str:
    """The best-schedule JSON of a row of that store. Raises StoreError also where the store cannot be read."""
    trials = len(trials_of(store.trials(record.campaign)))
    return schedule_text(record, find_campaign(store, record.campaign), trials)


def origin_text(origin: TrialRecord | Shipped, store: Store) -> str:
    """The best-schedule JSON of a row of that store, or of a shipped schedule. Raises as `stored_text`."""
    return origin.text() if isinstance(origin, Shipped) else stored_text(origin, store)


def schedule_text(record: TrialRecord, campaign: Campaign, trials: int) -> str:
    """The best-schedule JSON of a row of a campaign with that many trials. Raises StoreError for a row without a
    latency."""
    document = schedule_document(record, command=lower_command(record))
    document["provenance"]["search"] = search_command(campaign, trials)
    return dump_schedule(document)
