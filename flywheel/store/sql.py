"""The trial store: campaigns and their append-only trials in SQL, and queries of both. What
`measure.standing` decides in Python, which rows may be a campaign's best, is here in SQL."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    RowMapping,
    Select,
    and_,
    bindparam,
    case,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from flywheel.errors import StoreError, TrialExistsError
from flywheel.ir.show import show
from flywheel.measure.ceiling import Ceiling, PeerLink
from flywheel.measure.columns import fault_of
from flywheel.measure.outcome import LASTING_OUTCOMES, OUTCOME_NAMES
from flywheel.measure.record import COLUMNS, TrialRecord
from flywheel.measure.tenants import SPREAD
from flywheel.store.campaign import Campaign, CampaignSummary
from flywheel.store.claims import Claims, delete_campaign, keep_to_oneself
from flywheel.store.engine import make_engine, reading, violated, writing
from flywheel.store.migrate import ensure_schema
from flywheel.store.places import file_of, make_store_url
from flywheel.store.presence import enter
from flywheel.store.schema import campaigns, ceilings, links, record_values, trials

_RECORD: Final = tuple(trials.c[column.name] for column in COLUMNS)


def open_store(url: str | Path, *, create: bool = True) -> Store:
    """Open the store at a path (SQLite) or a `sqlite:` or `postgresql:` URL, creating or migrating it as needed.

    With `create=False` the store must exist; its schema may be older. Raises StoreError.
    """
    engine, name = make_engine(url, create=create)
    path = file_of(make_store_url(url))
    with ExitStack() as undo:
        if path is not None and not path.exists():
            undo.callback(_remove_empty, path)
        undo.callback(engine.dispose)
        ensure_schema(engine, name, create=create)
        undo.pop_all()
    return Store(engine, name)


def read_store(url: str | Path) -> Store:
    """Open a store that is there: `campaigns()` lists its campaigns, `trials(NAME)` the rows of one. Use it as a
    context manager, or call `close`. Raises StoreError."""
    return open_store(url, create=False)


def _remove_empty(path: Path) -> None:
    """Remove an empty file that could not be made into a store."""
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()


class Store:
    """An open store; use as a context manager or call `close`. Every method raises StoreError on database trouble."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name: Final = name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def create_campaign(self, campaign: Campaign) -> None:
        """Add a campaign. Raises StoreError where the name is taken."""
        with writing(self._engine, self.name) as connection:
            self._create(connection, campaign)

    def _create(self, connection: Connection, campaign: Campaign) -> None:
        values = {column.name: getattr(campaign, column.name) for column in campaigns.columns}
        try:
            connection.execute(insert(campaigns), values)
        except IntegrityError as error:
            if violated(error) is None:
                raise
            raise StoreError(f"store {self.name}: campaign {campaign.name!r} already exists") from None

    def replace_campaign(self, before: Campaign, after: Campaign) -> bool:
        """Replace what the store says of a campaign, unless it no longer says `before`. Whether it was replaced."""
        values = {column.name: getattr(after, column.name) for column in campaigns.columns if column.name != "name"}
        same = campaigns.c.name == before.name, campaigns.c.spec == before.spec
        with writing(self._engine, self.name) as connection:
            return connection.execute(update(campaigns).where(*same).values(values)).rowcount == 1

    def campaign(self, name: str) -> Campaign | None:
        """The campaign of that name; None if there is none."""
        with reading(self._engine, self.name) as connection:
            row = connection.execute(select(campaigns).where(campaigns.c.name == name)).mappings().one_or_none()
        return None if row is None else self._campaign(row)

    def campaigns(self) -> list[CampaignSummary]:
        """Every campaign, oldest first, with its counts and best latencies."""
        with reading(self._engine, self.name) as connection:
            found = [self._campaign(row) for row in connection.execute(select(campaigns)).mappings()]
            tallies, hosts = (_tallies(connection, self.name), _hosts(connection)) if found else ({}, {})
        found.sort(key=lambda campaign: (campaign.created_at, campaign.name))  # by code point, whatever the database's
        return [_summary(campaign, tallies.get(campaign.name, {}), hosts.get(campaign.name, ())) for campaign in found]

    def append(self, record: TrialRecord) -> None:
        """Add a trial for good. Raises TrialExistsError where its campaign has that trial already."""
        self.append_all((record,))

    def append_all(self, records: Sequence[TrialRecord], campaign: Campaign | None = None) -> None:
        """Add rows for good, all or none, with a new `campaign` for them where one is given. Raises TrialExistsError
        where a campaign has one of these trials already, StoreError where the new one's name is taken."""
        with writing(self._engine, self.name) as connection:
            if campaign is not None:
                self._create(connection, campaign)
            for name in sorted({record.campaign for record in records}):
                keep_to_oneself(connection, name)
            for record in records:
                try:
                    connection.execute(insert(trials), record_values(record))
                except IntegrityError as error:
                    where = f"store {self.name}: campaign {record.campaign!r}"
                    match violated(error):
                        case "foreign key":
                            raise StoreError(f"{where} does not exist") from error
                        case "unique":
                            raise TrialExistsError(f"{where} has trial {record.trial} already") from error
                    raise

    def delete_campaign(self, campaign: str) -> None:
        """Delete a campaign and all of its rows. Raises StoreError where a run is trying one of its configs now."""
        delete_campaign(self._engine, self.name, campaign)

    @contextmanager
    def share(self, campaign: str) -> Iterator[Claims]:
        """A run's share of a campaign, which other runs may search, too, until the block ends or its process does."""
        presence = enter(self._engine, self.name)
        try:
            yield Claims(self._engine, self.name, campaign, presence)
        finally:
            presence.end()

    def trials(self, campaign: str, first: int = 0) -> list[TrialRecord]:
        """A campaign's trials by number, from the `first` on."""
        mine = trials.c.campaign == campaign, trials.c.trial >= first
        query = select(*_RECORD).where(*mine).order_by(trials.c.trial)
        with reading(self._engine, self.name) as connection:
            return [self._record(row) for row in connection.execute(query).mappings()]

    def landmarks(self, campaign: str, config_ids: Collection[str]) -> list[TrialRecord]:
        """The few of a campaign's trials that decide what it gained, by number: its best, its finals, and all of the
        configs `config_ids` and of configs that were known before, which its seeds are."""
        seeds = select(trials.c.config_id).where(trials.c.campaign == campaign, trials.c.source == "seed")
        known = or_(trials.c.source == "final", trials.c.config_id.in_(config_ids), trials.c.config_id.in_(seeds))
        query = select(*_RECORD).where(trials.c.campaign == campaign, known)
        with reading(self._engine, self.name) as connection:
            found = {row.trial: row for row in map(self._record, connection.execute(query).mappings())}
        best = self.best(measured=True, campaign=campaign) or self.best(measured=False, campaign=campaign)
        found |= {} if best is None else {best.trial: best}
        return [found[trial] for trial in sorted(found)]

    def seen(
        self,
        program_id: str,
        *,
        gpu: str,
        dtype: str,
        measure: str,
        predictor: str | None = None,
        machine: Mapping[str, str | None] = MappingProxyType({}),
    ) -> TrialRecord | None:
        """The trial of this program, on this GPU and under this kind of measure, that need not be repeated: the newest
        final, else the first.

        Measured, rejected and incorrect ones do; a predicted one does where `predictor` gave its prediction; an
        imported one answers nothing. `machine` holds columns that must be as they are there, absent ones too.
        """
        given = {name: value for name, value in machine.items() if value is not None}
        query = _seen_query(tuple(given), tuple(name for name in machine if name not in given))
        asked = {"program_id": program_id, "gpu": gpu, "dtype": dtype, "measure": measure, "predictor": predictor}
        return self._first(query, asked | given)

    def best(
        self,
        *,
        measured: bool,
        campaign: str | None = None,
        model: str | None = None,
        gpu: str | None = None,
        dtype: str | None = None,
        context: int | None = None,
        batch: int | None = None,
        weights: str | None = None,
        predictor: str | None = None,
    ) -> TrialRecord | None:
        """The fastest measured trial, or with `measured=False` the fastest predicted one, the first of equals. An
        imported measurement is one only where none was made for this store.

        As `measure.standing.best_of` has it: a campaign's final replaces what was measured before, and a trial within
        the noise of its rival is no better than that. Each name that is given narrows the search; None where no trial
        is left.
        """
        objective, outcome = (trials.c.latency_us, "measured") if measured else (trials.c.predicted_us, "predicted")
        work = {"campaign": campaign, "model": model, "gpu": gpu, "dtype": dtype, "context": context,
                "batch": batch, "weights": weights}  # fmt: skip
        conditions = [trials.c[name] == value for name, value in work.items() if value is not None]
        source, may_be_best = contenders(conditions)
        conditions += [] if predictor is None else [trials.c.predictor == predictor]
        own_first = [imported(), doubtful()] if measured else []
        query = (
            select(*_RECORD)
            .select_from(source)
            .where(trials.c.outcome == outcome, may_be_best, *conditions)
            .order_by(*own_first, objective, trials.c.id if campaign is None else trials.c.trial)
            .limit(1)
        )
        return self._first(query)

    def append_ceiling(self, ceiling: Ceiling) -> None:
        """Add what a probing of a GPU found."""
        with writing(self._engine, self.name) as connection:
            connection.execute(insert(ceilings), asdict(ceiling))

    def ceiling(self, gpu: str) -> Ceiling | None:
        """What the newest probing of the GPU of that name found; None where there was none."""
        columns = [ceilings.c[field.name] for field in fields(Ceiling)]
        query = select(*columns).where(ceilings.c.gpu == gpu).order_by(ceilings.c.id.desc()).limit(1)
        with reading(self._engine, self.name) as connection:
            row = connection.execute(query).mappings().first()
        try:
            return None if row is None else Ceiling(**row)
        except ValueError as error:
            raise StoreError(f"store {self.name}: {error}") from error

    def append_link(self, found: PeerLink) -> None:
        """Add what a probing found of one link; the links of one probing have the same `created_at`."""
        with writing(self._engine, self.name) as connection:
            connection.execute(insert(links), asdict(found))

    def links(self, gpu: str) -> list[PeerLink]:
        """The links that the newest probing which found any, between GPUs of that name, measured, by peer."""
        newest = select(links.c.host, links.c.created_at).where(links.c.gpu == gpu).order_by(links.c.id.desc()).limit(1)
        columns = [links.c[field.name] for field in fields(PeerLink)]
        with reading(self._engine, self.name) as connection:
            run = connection.execute(newest).first()
            if run is None:
                return []
            same = links.c.gpu == gpu, links.c.host == run.host, links.c.created_at == run.created_at
            rows = connection.execute(select(*columns).where(*same).order_by(links.c.peer)).mappings().all()
        try:
            return [PeerLink(**row) for row in rows]
        except ValueError as error:
            raise StoreError(f"store {self.name}: {error}") from error

    def _first(self, query: Any, values: Mapping[str, str | None] = MappingProxyType({})) -> TrialRecord | None:
        with reading(self._engine, self.name) as connection:
            row = connection.execute(query, values).mappings().first()
        return None if row is None else self._record(row)

    def _campaign(self, row: RowMapping) -> Campaign:
        try:
            return Campaign(**row)
        except ValueError as error:
            raise StoreError(f"store {self.name}: {error}") from error

    def _record(self, row: RowMapping) -> TrialRecord:
        try:
            return TrialRecord(**row)
        except ValueError as error:
            raise StoreError(f"store {self.name}: {error}") from error


@lru_cache(maxsize=8)
def _seen_query(given: tuple[str, ...], absent: tuple[str, ...]) -> Select[Any]:
    """What `Store.seen` asks where some columns of a machine are given and others absent, by names of its arguments: a
    statement of every trial, which takes longer to build than to execute."""
    lasting = and_(trials.c.outcome.in_(LASTING_OUTCOMES), doubtful() == 0)
    current = or_(trials.c.outcome != "predicted", trials.c.predictor == bindparam("predictor"))
    same = [trials.c[name] == bindparam(name) for name in ("program_id", "gpu", "dtype", *given)]
    return (
        select(*_RECORD)
        .join(campaigns, campaigns.c.name == trials.c.campaign)
        .where(*same, *(trials.c[name].is_(None) for name in (*absent, "imported_from")))
        .where(campaigns.c.measure == bindparam("measure"), lasting, current)
        .order_by(case((trials.c.source == "final", -trials.c.id), else_=trials.c.id))
        .limit(1)
    )


@dataclass(frozen=True, slots=True)
class _OutcomeTally:
    """Of one outcome in a campaign: rows, those that are trials, and the latencies of the best."""

    rows: int
    trials: int
    latency_us: float | None
    imported_us: float | None
    predicted_us: float | None


def _tallies(connection: Connection, name: str) -> dict[str, dict[str, _OutcomeTally]]:
    """By campaign and outcome. Raises StoreError for what no row can hold."""
    source, may_be_best = contenders(())
    query = (
        select(
            trials.c.campaign,
            trials.c.outcome,
            func.count(),
            func.sum(case((trials.c.source == "final", 0), else_=1)),
            *(
                func.coalesce(
                    func.min(case((and_(may_be_best, imported() == place, doubtful() == 0), trials.c.latency_us))),
                    func.min(case((and_(may_be_best, imported() == place), trials.c.latency_us))),
                )
                for place in (0, 1)
            ),
            func.min(case((may_be_best, trials.c.predicted_us))),
        )
        .select_from(source)
        .group_by(trials.c.campaign, trials.c.outcome)
        .order_by(trials.c.campaign, trials.c.outcome)
    )
    tallies: dict[str, dict[str, _OutcomeTally]] = {}
    for campaign, outcome, *numbers in connection.execute(query):
        if outcome not in OUTCOME_NAMES:
            raise StoreError(f"store {name}: outcome {show(outcome)} is none of {', '.join(OUTCOME_NAMES)}")
        for value in numbers[2:]:
            if (fault := fault_of("latency_us", float, True, value)) is not None:
                raise StoreError(f"store {name}: the best latency of campaign {show(campaign)} {fault}")
        tallies.setdefault(campaign, {})[outcome] = _OutcomeTally(*numbers)
    return tallies


def _hosts(connection: Connection) -> dict[str, tuple[str, ...]]:
    """By campaign, the machines of its trials, in the order of their first."""
    first = func.min(trials.c.trial)
    query = select(trials.c.campaign, trials.c.host).group_by(trials.c.campaign, trials.c.host).order_by(first)
    found: dict[str, tuple[str, ...]] = {}
    for campaign, host in connection.execute(query):
        found[campaign] = (*found.get(campaign, ()), str(host))
    return found


def _summary(
    campaign: Campaign, tallies: dict[str, _OutcomeTally], hosts: tuple[str, ...]
) -> CampaignSummary:
    outcomes = {outcome: tally.trials for outcome, tally in tallies.items() if tally.trials}
    measured, predicted = tallies.get("measured"), tallies.get("predicted")
    return CampaignSummary(
        campaign,
        sum(tally.rows for tally in tallies.values()),
        sum(outcomes.values()),
        MappingProxyType(outcomes),
        None if measured is None else measured.latency_us,
        None if measured is None else measured.imported_us,
        None if predicted is None else predicted.predicted_us,
        hosts,
    )


def contenders(conditions: Sequence[ColumnElement[bool]]) -> tuple[FromClause, ColumnElement[bool]]:
    """Where to select trials from, and of a row there: it may be the best, as `measure.standing` says.

    `conditions` narrow the rows that are looked at, by whole campaigns. What a row is compared with is joined, each
    computed once: a look-up per row takes seconds with ten thousand of them.
    """
    newest = (
        select(trials.c.campaign, func.max(trials.c.trial).label("trial"))
        .where(trials.c.source == "final", *conditions)
        .group_by(trials.c.campaign)
        .subquery()
    )
    final = trials.alias("final")
    last = (
        select(final.c.campaign, final.c.trial, final.c.created_at)
        .join(newest, and_(newest.c.campaign == final.c.campaign, newest.c.trial == final.c.trial))
        .subquery()
    )
    first = (
        select(trials.c.campaign, trials.c.program_id, func.min(trials.c.trial).label("trial"))
        .where(*conditions)
        .group_by(trials.c.campaign, trials.c.program_id)
        .subquery()
    )
    source = trials.outerjoin(last, last.c.campaign == trials.c.campaign).outerjoin(
        first, and_(first.c.campaign == trials.c.campaign, first.c.program_id == trials.c.program_id)
    )
    is_final = trials.c.source == "final"
    certain = or_(trials.c.gain_low_us.is_(None), trials.c.gain_low_us > 0.0, is_final)
    holds = or_(
        last.c.trial.is_(None),
        trials.c.trial > last.c.trial,
        and_(is_final, trials.c.created_at == last.c.created_at),
    )
    new = or_(trials.c.source != "store", first.c.trial == trials.c.trial)
    return source, and_(certain, holds, new)


def imported() -> ColumnElement[int]:
    """Of a row: 1 where it was imported, else 0."""
    return case((trials.c.imported_from.is_(None), 0), else_=1)


def doubtful() -> ColumnElement[int]:
    """Of a row: 1 where it `is_doubtful`, else 0."""
    spread = trials.c.p90_us - trials.c.p10_us > SPREAD * trials.c.latency_us
    return case((and_(trials.c.outcome == "measured", or_(trials.c.strangers > 0, spread)), 1), else_=0)
