from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from rows import config_id_of, timed

from flywheel.cost_model import MODEL_VERSION, predict, timeline
from flywheel.ir import config_from_dict, config_to_dict
from flywheel.ir.files import parse_json
from flywheel.lowering.lower import lower
from flywheel.measure.latency import RESOLUTION, difference
from flywheel.measure.record import TrialRecord
from flywheel.plan import program_id
from flywheel.report.changes import Change, changes, costliest
from flywheel.report.facts import Facts, gather
from flywheel.report.history import MOST_TIMES, history
from flywheel.report.knobs import MOST_AXES, costs, weighty
from flywheel.report.layer import shares
from flywheel.report.page import page, pictures
from flywheel.search.knowledge.known import Known
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.campaign import Campaign

Records = Callable[..., list[TrialRecord]]
Campaigns = Callable[..., Campaign]
REJECTED: Any = {
    "outcome": "rejected", "reason": "no", "predicted_us": None, "predictor": None, "floor_fraction": None,
}  # fmt: skip
ALL = {
    "history.svg", "costs.svg", "coordinates.svg", "coordinates_rest.svg", "layer.svg",
}  # fmt: skip


@pytest.fixture(scope="module")
def facts(make_records: Records, make_campaign: Campaigns) -> Facts:
    """A campaign whose best trial lowers to the program that its row names."""
    records = make_records(40)
    workload = make_workload("smollm2-135m", "l4", "bf16", 512)
    program = lower(workload.graph, config_from_dict(parse_json(records[0].config)), workload.target)
    return gather(make_campaign(), [replace(record, program_id=program_id(program)) for record in records])


class Tags(HTMLParser):
    """Collects the tags that stay open, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


def test_the_page_fetches_nothing_and_closes_what_it_opens(facts: Facts) -> None:
    text = page(facts, '{"a": 1}', "flywheel search")
    assert parse(text).fetched == []
    assert "url(" not in text
    assert "@import" not in text


def test_the_same_rows_give_the_same_bytes(facts: Facts) -> None:
    again = gather(facts.campaign, facts.records)
    assert page(again, None, "x") == page(facts, None, "x")
    assert pictures(again) == pictures(facts)


def test_every_picture_is_a_file_that_stands_alone(facts: Facts) -> None:
    drawn = pictures(facts)
    assert drawn.keys() == ALL
    for drawing in drawn.values():
        assert ElementTree.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"


def test_ten_thousand_trials_fit_in_two_megabytes(
    make_records: Records, make_campaign: Campaigns
) -> None:
    facts = gather(make_campaign(), make_records(10_000))
    assert len(page(facts, None, "x").encode()) < 2_000_000


@pytest.mark.parametrize("field", ["name", "model", "sampler"])
def test_names_of_strangers_are_only_text(field: str, make_records: Records, make_campaign: Campaigns) -> None:
    evil = '<script src="http://x">alert(1)</script>\x1b'
    changed: Any = {field: evil}
    text = page(gather(make_campaign(**changed), make_records(2)), f'"{evil}"', evil)
    assert parse(text).fetched == []
    assert "\x1b" not in text
    assert "&lt;script" in text


def test_reasons_and_hosts_of_strangers_are_only_text(make_records: Records, make_campaign: Campaigns) -> None:
    evil = "</td><script>alert(1)</script>"
    rows = make_records(3, **{**REJECTED, "reason": evil, "host": evil})
    assert parse(page(gather(make_campaign(), rows), None, "x")).fetched == []


def test_predicted_and_measured_latencies_are_told_apart(make_records: Records, make_campaign: Campaigns) -> None:
    predicted = make_records(5)
    measured = [timed(row, 2500.0, trial=5 + row.trial) for row in predicted]
    only = page(gather(make_campaign(), predicted), None, "x")
    assert "predicted by a cost model" in only
    assert "measured: " not in only
    both = history([*predicted, *measured])
    assert both is not None
    assert "measured: 5 trials" in both
    assert "predicted: 10 trials" in both
    assert 'class="measured"' in both
    text = page(gather(make_campaign(), [*predicted, *measured]), None, "x")
    assert "2,500.0 us a token</b>best, measured" in text


def test_predictions_have_no_more_digits_than_they_are_good_for(
    make_records: Records, make_campaign: Campaigns
) -> None:
    bare = {"floor_us": None, "floor_fraction": None}
    rows = [replace(row, predicted_us=2345.6 - row.trial, **bare) for row in make_records(3)]
    text = page(gather(make_campaign(), rows), None, "x")
    assert "<b>2,340 us a token</b>best, predicted" in text
    assert "<b>427</b>tokens a second" in text
    assert "trial 2: predicted 2,340 us" in text
    assert '<td class="n">2,340</td><td>predicted</td>' in text
    assert [us for us in ("2,345.6", "2,344.6", "2,343.6") if us in text] == []


def held(make_records: Records, *, high_us: float) -> list[TrialRecord]:
    """Three measured trials, and a final of the best two, of which the second one surely wins below `high_us` 0."""
    blank = {"predicted_us": None, "predictor": None}
    trials = [timed(row, 2000.0 + row.trial, program_id=f"p{row.trial}", **blank) for row in make_records(3)]
    gains = ((2100.0, -3.0, high_us), (2090.0, -high_us, 3.0))
    return trials + [
        timed(row, us, trial=3 + row.trial, source="final", rival_us=2090.0, gain_low_us=low, gain_high_us=high)
        for row, (us, low, high) in zip(trials[:2], gains, strict=True)
    ]  # fmt: skip


def test_a_final_is_no_trial_and_its_fastest_is_the_best(make_records: Records, make_campaign: Campaigns) -> None:
    facts = gather(make_campaign(), held(make_records, high_us=-1.0))
    assert (facts.best, len(facts.trials), facts.tied) == (facts.records[4], 3, ())
    text = page(facts, None, "x")
    assert "2,090.0 us a token</b>best, measured" in text
    assert "<b>3</b>trials" in text
    assert "measured: 3 trials" in text
    assert "measured again in finals: 2" in text
    assert "3 measured." in text
    assert text.count('class="final paper"') == 3  # two, and the legend's
    assert "it took 1.00 to 3.00 us less than the next (99 % interval)" in text
    assert "Tied" not in text
    assert re.findall(r'<tr><td class="n">(\d+)</td>', text)[:3] == ["4", "3", "2"]


def test_a_best_that_is_tied_says_so(make_records: Records, make_campaign: Campaigns) -> None:
    text = page(gather(make_campaign(), held(make_records, high_us=1.0)), None, "x")
    assert "Tied with final 3 (2,100.0 us): the difference is within the noise of the final." in text
    assert "99 % interval" not in text


def test_a_best_without_a_final_or_with_company_says_so(make_records: Records, make_campaign: Campaigns) -> None:
    trials = held(make_records, high_us=1.0)[:3]
    crowded = [replace(row, throttle="power", strangers=2) for row in trials]
    text = page(gather(make_campaign(), crowded), None, "x")
    assert "No final was held" in text
    assert "others computed on it: throttled (power), strangers (2)." in text
    assert "No final was held" not in page(gather(make_campaign(), make_records(3)), None, "x")


def test_one_slow_trial_does_not_flatten_the_others(make_records: Records, make_campaign: Campaigns) -> None:
    usual = make_records(8)
    slow = replace(usual[0], trial=8, predicted_us=150_000.0, floor_fraction=0.01)
    before, drawing = history(usual), history([*usual, slow])
    assert before is not None
    assert drawing is not None
    scales = [re.findall(r'class="end faint">([\d,]+)<', each) for each in (before, drawing)]
    assert max(int(tick.replace(",", "")) for tick in scales[1]) <= MOST_TIMES * 2000.0
    assert len(scales[1]) >= 3
    assert "above 2,200 us: 3, up to 150,000 us" in drawing
    assert "above 2,200 us: 2, up to 2,260 us" in before
    said = page(gather(make_campaign(), [*usual, slow]), None, "x")
    assert "3 trials above 2,200 us, 1.1 times the best, are triangles at the upper edge" in said
    assert "log scale" in said


def test_a_legend_names_only_what_is_there(make_records: Records, make_campaign: Campaigns) -> None:
    predicted = page(gather(make_campaign(), make_records(5)), None, "x")
    assert "Hollow blue" in predicted
    for absent in ("Full orange", "Diamonds", "triangle", "no latency: ", "measured again"):
        assert absent not in predicted
    measured = [timed(row, 2500.0, predicted_us=None, predictor=None) for row in make_records(5)]
    text = page(gather(make_campaign(), measured), None, "x")
    assert "Full orange" in text
    assert "Hollow blue" not in text


def test_pictures_and_page_have_a_dark_side(facts: Facts) -> None:
    assert all("@media(prefers-color-scheme:dark)" in drawing for drawing in pictures(facts).values())
    text = page(facts, None, "x")
    assert "color-scheme:light dark" in text
    drawn = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    assert not re.search(r"(fill|stroke)=.#(fff|1d2733)", drawn)


def test_a_dozen_knobs_that_can_cost_most_are_drawn_and_the_others_on_demand(facts: Facts) -> None:
    assert facts.knobs is not None
    found = changes(facts.knobs, facts.trials, facts.best)
    most, rest = weighty(facts.knobs, found)
    assert len(most) == MOST_AXES
    searched = {axis.name for axis in facts.knobs.dimensions if len(axis.values) > 1}
    assert {axis.name for axis in [*most, *rest]} == searched
    assert [axis.name for axis in most[:2]] == list(costliest(found)) == ["depth", "chunk"]
    text = page(facts, None, "x")
    assert text.index("The 12 knobs that can cost most") < text.index("<summary>the other knobs</summary>")


def test_a_change_costs_what_its_trial_took_beside_the_best(facts: Facts) -> None:
    assert facts.knobs is not None
    assert facts.best is not None
    found = {(each.knob, each.value): each for each in changes(facts.knobs, facts.trials, facts.best)}
    assert set(found) == {("depth", 2), ("depth", 4), ("depth", 8), ("chunk", 8192)}
    assert found["chunk", 8192].alone_us == pytest.approx(37.0)
    assert found["depth", 2].alone_us == pytest.approx(2 * 37.0)
    assert (found["depth", 8].trials, found["depth", 8].least_us) == (10, pytest.approx(6 * 37.0))
    assert "What a change costs" in page(facts, None, "x")


def test_a_change_that_no_trial_made_alone_says_so(facts: Facts) -> None:
    records = [record for record in facts.records if record.trial % 8 != 1]  # depth 1, chunk 8192
    left = gather(facts.campaign, records)
    assert left.knobs is not None
    assert left.best is not None
    found = {(each.knob, each.value): each for each in changes(left.knobs, left.trials, left.best)}
    assert found["chunk", 8192].alone_us is None
    assert found["chunk", 8192].least_us == pytest.approx(3 * 37.0)
    text = page(left, None, "x")
    assert "empty where none does" in text and "not tried" not in text


def test_a_search_that_changed_no_knob_alone_has_no_column_of_it(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_alone(*given: Any) -> list[Change]:
        return [replace(each, alone_us=None) for each in changes(*given)]

    monkeypatch.setattr("flywheel.report.page.changes", none_alone)
    text = page(facts, None, "x")
    assert "No trial differs from the best in one knob alone." in text
    assert "only that, us" not in text and "at best, us" in text


def test_the_dots_of_new_bests_are_in_the_legend(facts: Facts) -> None:
    drawn = history(facts.records)
    assert drawn is not None
    counts = [int(count) for count in re.findall(r"new best (?:measured|predicted): (\d+)", drawn)]
    assert counts and sum(counts) + len(counts) == drawn.count('r="5.5"')  # with the legend's own


def test_no_cell_of_a_table_breaks_within_a_word(facts: Facts) -> None:
    text = page(facts, None, "x")
    style = text[text.index("<style>") : text.index("</style>")]
    assert re.findall(r"([\w.,]+)\{[^}]*overflow-wrap", style) == ["h1"]
    assert ".wide{overflow-x:auto}" in style


def test_the_states_of_sms_are_explained_beside_the_picture_with_its_numbers(facts: Facts) -> None:
    text = page(facts, None, "x")
    below = text[text.index("The best schedule on every SM") :]
    legend = dict(re.findall(r">(\w+) ([\d.]+% \([\d.]+%)\)<", below))
    table = {name: f"{here} ({step}" for name, here, step in re.findall(
        r"<td>(\w+)</td><td class=\"n\">([\d.]+%)</td><td class=\"n\">([\d.]+%)</td><td>it", below)}  # fmt: skip
    assert list(legend) == ["multiply", "stage", "other", "starve", "wait", "idle"]
    assert table.items() <= legend.items()
    assert len(table) == len(legend)


def test_every_table_has_a_box_of_its_own_to_scroll_in(facts: Facts) -> None:
    text = page(facts, None, "x")
    assert text.count("<table") == text.count('<div class="wide"><table') > 3


def test_the_staircase_leaves_out_what_is_within_the_noise(make_records: Records) -> None:
    trials = held(make_records, high_us=1.0)[:2]
    lucky = timed(trials[1], 1990.0, rival_us=1991.0, gain_low_us=-1.0, gain_high_us=2.0)
    drawing = history([trials[0], lucky])
    assert drawing is not None
    assert "trial 0: measured 2,000.0 us" in drawing
    assert "trial 1: measured" not in drawing


def test_the_floor_is_a_line_below_every_latency(make_records: Records) -> None:
    rows = [replace(row, floor_us=1900.0, floor_fraction=1900.0 / row.objective_us) for row in make_records(8)]
    drawing = history(rows)
    assert drawing is not None
    root = ElementTree.fromstring(drawing)
    line = next(each for each in root.iter() if each.get("class") == "floor")
    floor = float(re.findall(r"[\d.]+", line.get("d") or "")[1])
    marks = [each.get("cy") for each in root.iter() if each.tag.endswith("circle")]
    heights = [float(y) for y in marks if y and float(y) > 50]  # the legend is above
    assert heights
    assert max(heights) < floor
    assert "weight floor, 1,900.0 us" in drawing
    far = history(make_records(8))  # of a floor of 1,500 us, which would hide what the search gained
    assert far is not None
    assert "weight floor" not in far


def test_a_model_that_is_gone_leaves_out_what_needs_it(make_records: Records, make_campaign: Campaigns) -> None:
    facts = gather(make_campaign(model="/gone/model"), make_records(3))
    assert facts.knobs is None
    assert facts.schedule is None
    text = page(facts, None, "x")
    assert "Not known: " in text
    assert "2,000 us" in text
    assert pictures(facts).keys() == {"history.svg"}


def test_a_config_that_lowers_to_another_program_has_no_timeline(
    make_records: Records, make_campaign: Campaigns
) -> None:
    records = make_records(3)
    facts = gather(make_campaign(), [replace(record, program_id="2-0123456789abcdef") for record in records])
    assert facts.schedule is None
    assert "another program" in page(facts, None, "x")
    older = gather(make_campaign(), records)  # whose ids do not say which programs they are of
    assert older.schedule is not None


@pytest.mark.parametrize("count", [0, 3])
def test_a_campaign_without_latencies_is_a_page(count: int, make_records: Records, make_campaign: Campaigns) -> None:
    rows = make_records(count, **REJECTED)
    text = page(gather(make_campaign(), rows), None, "x")
    parse(text)
    assert "No trial has a latency." in text


BARS = r"<title>([\w.]+): \+([\d,.]+) us with (\w+) instead of \w+</title>"


def test_a_knob_costs_what_its_worst_value_costs_where_nothing_else_changes(facts: Facts) -> None:
    assert facts.best is not None
    bad: Any = {"predicted_us": 90_000.0, "trial": 40, "floor_us": None, "floor_fraction": None}
    space = make_space(make_workload("smollm2-135m", "l4", "bf16", 512))
    config = space.to_config({**space.known_good()[0], "depth": 3, "chunk": 8192, "threads": 192})  # all of it slow
    slow = replace(
        facts.records[0], config=json.dumps(config_to_dict(config)), config_id=config.config_id, **bad
    )  # fmt: skip
    spoilt = gather(facts.campaign, [*facts.records, slow])
    drawing = pictures(spoilt)["costs.svg"]
    assert re.findall(BARS, drawing) == [("depth", "220", "8"), ("chunk", "40", "8192")]
    said = page(spoilt, None, "x")
    assert "Not known, since no trial changed them alone: rows.qkv, " in said
    assert costs([], facts.best) is None


@pytest.fixture(scope="module")
def foretold(make_records: Records, make_campaign: Campaigns) -> Facts:
    """A campaign of one trial, which this version predicts as its row does."""
    (record,) = make_records(1, predictor=MODEL_VERSION)
    workload = make_workload("smollm2-135m", "l4", "bf16", 512)
    program = lower(workload.graph, config_from_dict(parse_json(record.config)), workload.target)
    bare = {"floor_us": None, "floor_fraction": None}
    return gather(make_campaign(), [replace(record, predicted_us=predict(program).latency_us, **bare)])


def test_what_a_knob_costs_a_predicted_best_is_predicted_and_not_guessed_from_trials(foretold: Facts) -> None:
    knobs, best = foretold.knobs, foretold.best
    assert knobs is not None and knobs.best is not None and best is not None and best.objective_us is not None
    workload = make_workload("smollm2-135m", "l4", "bf16", 512)
    space, alone = make_space(workload), {}
    for axis in knobs.dimensions:
        for value in axis.values:
            if value != knobs.best[axis.name]:
                program = lower(workload.graph, space.to_config({**knobs.best, axis.name: value}), workload.target)
                alone[axis.name, value] = predict(program).latency_us - best.objective_us
    found = changes(knobs, foretold.trials, best)
    assert {(each.knob, each.value): each.alone_us for each in found} == pytest.approx(alone)
    worst = {knob: max(us for (name, _), us in alone.items() if name == knob) for knob, _ in alone}
    bars = re.findall(BARS, pictures(foretold)["costs.svg"])
    assert [knob for knob, _, _ in bars] == sorted(
        (knob for knob, us in worst.items() if us > RESOLUTION * best.objective_us), key=lambda knob: -worst[knob]
    )
    assert bars[0][1] == difference(worst[bars[0][0]], best.objective_us).removeprefix("+")
    assert "about 0" in page(foretold, None, "x")


def test_the_words_of_a_bar_are_above_it_and_fit_a_phone(foretold: Facts) -> None:
    root = ElementTree.fromstring(pictures(foretold)["costs.svg"])
    assert float(root.get("width") or "") <= 400
    assert max(float(each.get("width") or "") for each in root.iter() if each.get("class") == "bar") < 400
    assert '<div class="narrow"><svg' in page(foretold, None, "x")


def test_a_best_that_this_version_refuses_says_so_wherever_it_would_be_shown(
    make_records: Records, make_campaign: Campaigns
) -> None:
    record = make_records(1)[0]
    document = parse_json(record.config)
    document["tiling"]["stream"]["pause_cycles"] = 3000
    text = json.dumps(document)
    facts = gather(make_campaign(), [replace(record, config=text, config_id=config_id_of(text))])
    said = page(facts, None, "x")
    assert said.count("the best schedule sets what this version&#x27;s search does not change") == 2
    assert "Not shown: this version does not run the best schedule, trial 0: tiling.stream.pause_cycles" in said
    assert "orange" not in said and "Too few trials" not in said


@pytest.mark.parametrize("batch", [1, 8])
def test_a_measured_answer_leads_the_page_and_is_a_line_of_its_history(
    batch: int, make_records: Records, make_campaign: Campaigns
) -> None:
    facts = gather(make_campaign(batch=batch), make_records(3, batch=batch))
    known = Known(config_from_dict(parse_json(facts.records[0].config)), 2050.0, facts.records[0])
    text = page(replace(facts, known=known), None, "x")
    step = "token" if batch == 1 else "step"
    assert f"<b>2,050.0 us a {step}</b>the answer, measured" in text
    assert f"<b>{batch * 1e6 / 2050:,.0f}</b>tokens a second" in text
    assert "<b>73.2%</b>of the floor" in text  # of 1,500 us
    assert "the answer, measured: 2,050.0 us<" in text and 'class="measured answer"' in text
    assert f">us a {step}, log scale<" in text
    assert "is predicted to take 2,000 us" in text and "best, predicted" not in text
    assert "the answer" not in page(facts, None, "x")


def test_what_was_known_before_and_the_spread_of_finals_are_drawn(make_records: Records) -> None:
    rows = held(make_records, high_us=1.0)
    seeded = [replace(row, source="seed") if row.source == "search" and row.trial == 0 else row for row in rows]
    drawing = history(seeded)
    assert drawing is not None
    assert "known before: 1" in drawing
    finals = sum(row.source == "final" for row in rows)
    assert len(re.findall(r'<path d="M[\d. ]+L[\d. ]+" stroke="currentColor" class="final"/>', drawing)) == finals > 0


def test_each_task_of_a_product_in_the_layer_multiplies_once(facts: Facts) -> None:
    assert facts.schedule is not None
    program = facts.schedule.program
    layers = sorted({int(found[1]) for task in program.tasks if (found := re.match(r"L(\d+)\.", task.label))})
    middle = [task for task in program.tasks if task.label.startswith(f"L{layers[len(layers) // 2]}.")]
    products = [task for task in middle if task.label.endswith("_proj")]
    root = ElementTree.fromstring(pictures(facts)["layer.svg"])
    (multiplying,) = [each.get("d") or "" for each in root.iter() if each.get("class") == "state multiply"]
    assert multiplying.count("M") == len(products) > 100
    assert sum(share.tasks for share in shares(facts.schedule)) == len(timeline(program))
    assert sum(share.time_share for share in shares(facts.schedule)) == pytest.approx(1)
