from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import prod

import pytest
from effort import pairs, sample
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import UsageError
from flywheel.ir import TARGETS, GpuTarget, ScheduleConfig, config_from_dict, config_to_dict
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.spec import DecoderSpec
from flywheel.plan import program_id, variant_of
from flywheel.search.knobs import KNOBS, REMOVED, Choice, Value
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload
from flywheel.vm.pack import pack

SMALL = DecoderSpec("small", "qwen3", 96, 160, 2, 4, 2, 16, 300, 1e4, 1e-6, 4096, qk_norm=True)
FEW_SMS = replace(TARGETS["h100"], name="few", num_sms=6)
TWO_SMS = replace(TARGETS["h100"], name="two", num_sms=2)


def workload(
    spec: DecoderSpec = SMALL, target: GpuTarget = FEW_SMS, context: int = 512, dtype: str = "bf16", batch: int = 1
) -> Workload:
    return Workload(spec.name, spec, target, dtype, context, batch)


@pytest.fixture(scope="module")
def space() -> Space:
    return make_space(workload())


@st.composite
def choices(draw: st.DrawFn, space: Space) -> dict[str, Value]:
    return {dim.name: draw(st.sampled_from(dim.values)) for dim in space.dimensions}


def identity(space: Space, choice: Choice) -> str:
    work = space.workload
    return program_id(lower(work.graph, space.to_config(choice), work.target))


def dead_values(space: Space, base: Choice) -> Iterator[str]:
    """Pairs of values of one knob that lower to the same program."""
    for dimension in space.dimensions:
        programs = {value: identity(space, {**base, dimension.name: value}) for value in dimension.values}
        for first, second in combinations(dimension.values, 2):
            if programs[first] == programs[second]:
                yield f"{dimension.name}: {first} and {second}"


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-8b"])
def test_every_value_of_every_knob_changes_the_program(model: str) -> None:
    # Two layers do what all do, and leave time for some sixty programs.
    spec = replace(CATALOG[model], n_layers=2)
    searched = make_space(workload(spec, TARGETS["h100"]))
    base = searched.known_good()[1]
    assert int(base["kv_block"]) < 512
    assert all(len(dimension.values) > 1 for dimension in searched.dimensions)
    assert list(dead_values(searched, base)) == []


# Cards of one architecture with as many SMs have the same schedules.
CHIPS = tuple({(target.sm_arch, target.num_sms): target for target in TARGETS.values()}.values())


@pytest.mark.parametrize(("target", "context"), pairs([*CHIPS, FEW_SMS, TWO_SMS], [64, 500]))
def test_no_value_is_dead_on_a_small_model(target: GpuTarget, context: int) -> None:
    searched = make_space(workload(target=target, context=context))
    assert list(dead_values(searched, searched.known_good()[1])) == []


def test_knobs_are_the_dimensions_in_order(space: Space) -> None:
    assert [dimension.name for dimension in space.dimensions] == [knob.name for knob in KNOBS]
    assert all(knob.meaning for knob in KNOBS)
    assert [dim.values for dim in space.dimensions] == [tuple(dict.fromkeys(dim.values)) for dim in space.dimensions]
    assert all(list(dim.values) == sorted(map(int, dim.values)) for dim in space.dimensions if dim.ordered)


@given(st.data())
def test_a_choice_survives_its_config_and_the_config_its_file(space: Space, data: st.DataObject) -> None:
    choice = data.draw(choices(space))
    config = space.to_config(choice)
    assert space.to_choice(config) == choice
    assert space.to_choice(config_from_dict(config_to_dict(config))) == choice


@given(st.data())
def test_configs_outside_the_space_mean_no_choice(space: Space, data: st.DataObject) -> None:
    config = space.to_config(data.draw(choices(space)))
    for foreign in (
        replace(config, pipelining_depth=5),
        replace(config, threads_per_block=224),
        replace(config, sm_assignment={0: 1}),
        replace(config, tiling={**config.tiling, "gemv": {"N_tile": 16}}),
        replace(config, tiling={**config.tiling, "gemv.up_proj": {"N_tile": 1600}}),
        replace(config, tiling={}),
        replace(config, fusion_grouping=(*config.fusion_grouping, ("embed",))),
        ScheduleConfig(),
    ):
        assert space.to_choice(foreign) is None


@pytest.mark.parametrize("model", ["llama3.2-1b", "qwen3-0.6b", "qwen2.5-7b", "smollm2-135m", "llama3-70b"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_every_ring_of_the_space_fits_every_gpu(model: str, dtype: str) -> None:
    spec = replace(CATALOG[model], n_layers=1, vocab=512)
    for target in CHIPS:
        searched = make_space(workload(spec, target, dtype=dtype))
        for base in sample(searched.known_good()):
            for smem in values(searched, "smem"):
                for chunk in values(searched, "chunk"):
                    config = searched.to_config({**base, "smem": smem, "chunk": chunk})
                    variant = variant_of(lower(searched.workload.graph, config, target))
                    assert (variant.smem_bytes, variant.chunk_bytes) == (smem, chunk)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_every_ring_of_a_batch_fits_an_operand_that_is_staged_in_slices(batch: int) -> None:
    spec = replace(CATALOG["llama3-8b"], n_layers=1, vocab=512)
    searched = make_space(workload(spec, TARGETS["h200"], batch=batch))
    for base in sample(searched.known_good()):
        for smem in values(searched, "smem"):
            for chunk in values(searched, "chunk"):
                config = searched.to_config({**base, "smem": smem, "chunk": chunk})
                packed = pack(lower(searched.workload.graph, config, searched.workload.target))
                assert (packed.variant.smem_bytes, packed.variant.chunk_bytes) == (smem, chunk)
    assert {8192, 16384} <= {*values(searched, "chunk")}


@pytest.mark.parametrize(("weights", "chunks"), [("int8", (16384, 32768)), ("int4", (8192, 16384, 32768))])
def test_sizes_of_chunks_that_hold_as_many_units_are_one_value(weights: str, chunks: tuple[int, ...]) -> None:
    spec = replace(CATALOG["llama3.2-1b"], n_layers=1, vocab=512)
    searched = make_space(Workload(spec.name, spec, TARGETS["h200"], "bf16", 512, 1, weights))
    assert values(searched, "chunk") == chunks
    base = searched.known_good()[0]
    configs = [searched.to_config({**base, "chunk": chunk}) for chunk in chunks]
    variants = {variant_of(lower(searched.workload.graph, config, TARGETS["h200"])) for config in configs}
    assert len(variants) == len(chunks)


def values(space: Space, name: str) -> tuple[Value, ...]:
    return next(dimension.values for dimension in space.dimensions if dimension.name == name)


def test_known_good_choices_are_in_the_space_and_fuse_everything(space: Space) -> None:
    for choice in space.known_good():
        assert space.to_choice(space.to_config(choice)) == choice
        assert choice["fuse.out"] >= 1 and choice["fuse.mlp_in"] == 2
    whole, split, ahead = space.known_good()
    assert whole["kv_block"] == 512 and int(split["kv_block"]) < 512
    assert (ahead["depth"], ahead["copies"]) == (1, 2)
    assert any({"k_append", "attention"} <= {*group} for group in space.to_config(whole).fusion_grouping)


def test_kernels_are_those_of_all_configs_and_the_first_is_a_good_one(space: Space) -> None:
    def kernel(choice: Choice) -> tuple[int, int, int]:
        program = lower(space.workload.graph, space.to_config(choice), space.workload.target)
        variant = variant_of(program)
        return variant.threads, variant.matrix_warps, variant.rows

    good, kernels = space.known_good()[0], space.kernels()
    sizes = [(threads, matrix) for threads in values(space, "threads") for matrix in values(space, "matrix")]
    assert {kernel({**good, "threads": threads, "matrix": matrix}) for threads, matrix in sizes} == {*kernels}
    assert kernels[0] == kernel(good)
    near = {
        kernel({**good, name: each})
        for name in ("threads", "matrix")
        for each in values(space, name)
        if abs(values(space, name).index(each) - values(space, name).index(good[name])) == 1
    }
    assert {*kernels[1 : 1 + len(near)]} == near
    pinned = make_space(space.workload, {"threads": "512", "matrix": "8"})
    assert pinned.kernels() == [(512, 8, space.workload.batch)]


@pytest.mark.parametrize("context", [1, 2, 17, 40, 4096])
def test_every_context_has_a_space(context: int) -> None:
    searched = make_space(workload(context=context))
    blocks = [int(value) for value in values(searched, "kv_block")]
    assert blocks[-1] >= context
    assert all(block < context for block in blocks[:-1])
    assert all(identity(searched, choice) for choice in searched.known_good())


def test_pinned_knobs_have_one_value() -> None:
    pinned = make_space(workload(), {"depth": "4", "placement": "round_robin"})
    assert values(pinned, "depth") == (4,)
    assert values(pinned, "placement") == ("round_robin",)
    free = make_space(workload())
    count, all_ = (prod(len(dim.values) for dim in each.dimensions) for each in (pinned, free))
    assert count * len(values(free, "depth")) * len(values(free, "placement")) == all_


@pytest.mark.parametrize(
    ("fixed", "names"),
    [
        ({"warps": "4"}, ("'warps'", "rows.qkv", "chunk")),
        ({"depth": "5"}, ("depth", "'5'", "0, 1, 2, 3, 4, 6, 8")),
        ({"placement": "a\nb"}, ("placement", "idle_first")),
        *(({name: old.value}, (f"'{name}'", "no search sets it any more", old.now)) for name, old in REMOVED.items()),
    ],
)
def test_unknown_knobs_and_values_are_refused(fixed: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        make_space(workload(), fixed)
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in names)


@given(data=st.data())
def test_nearest_gives_back_what_the_space_has(space: Space, data: st.DataObject) -> None:
    choice = data.draw(choices(space))
    assert space.to_config(space.nearest(space.to_config(choice))) == space.to_config(choice)


def test_nearest_of_a_config_whose_loaders_paused_does_without_the_pause(space: Space) -> None:
    config = space.to_config(space.known_good()[2])
    stream = {**config.tiling["stream"], "pause_cycles": 3000}
    paused = replace(config, tiling={**config.tiling, "stream": stream})
    assert space.to_choice(paused) is None
    assert space.to_config(space.nearest(paused)) == config


def test_nearest_of_a_config_whose_products_begin_with_a_half_has_them_wait_for_all(space: Space) -> None:
    choice = {**space.known_good()[2], "hand_off": "data"}
    config = space.to_config(choice)
    halves = replace(config, tiling={**config.tiling, "hand_off": {"data": 1, "slices": 2}})
    assert space.to_choice(halves) is None
    assert space.nearest(halves) == choice


def test_nearest_of_a_config_that_says_what_no_knob_decides_has_the_rules_value(space: Space) -> None:
    config = space.to_config(space.known_good()[2])
    taller = {name: {"N_tile": 2 * config.tiling[name]["N_tile"]} for name in ("gemv.k_proj", "gemv.v_proj")}
    for said in (replace(config, tiling={**config.tiling, **taller}), replace(config, page_allocation="linear")):
        assert space.to_choice(said) is None
        assert space.to_config(space.nearest(said)) == config


sizes = st.integers(-1, 300_000)
names = st.sampled_from(["gemv", "gemv.q_proj", "gemv.lm_head", "attention", "stream", "unknown"])
strangers = st.builds(
    ScheduleConfig,
    tiling=st.dictionaries(names, st.dictionaries(st.sampled_from(["N_tile", "kv_block", "chunk_bytes"]), sizes)),
    fusion_grouping=st.lists(st.lists(st.sampled_from(["rmsnorm", "gemv", "o_proj", "attn_add", "gate"]), max_size=3)),
    sm_assignment=st.sampled_from(["load_balance", "round_robin", "other"]) | st.just({0: 1}),
    pipelining_depth=sizes, page_allocation=st.sampled_from(["none", "linear", "other"]), threads_per_block=sizes,
    smem_bytes_per_block=sizes,
)  # fmt: skip


@given(config=strangers)
def test_nearest_of_any_config_is_of_the_space_and_lowers(space: Space, config: ScheduleConfig) -> None:
    choice = space.nearest(config)
    assert all(choice[dimension.name] in dimension.values for dimension in space.dimensions)
    assert space.to_choice(space.to_config(choice)) is not None


def test_nearest_takes_what_a_foreign_config_says_and_no_more(space: Space) -> None:
    foreign = ScheduleConfig(
        tiling={"gemv": {"N_tile": 64}}, fusion_grouping=(("rmsnorm", "gemv"),), pipelining_depth=5,
        page_allocation="linear", threads_per_block=600,
    )  # fmt: skip
    choice, good = space.nearest(foreign), space.known_good()[0]
    heights = next(dimension.values for dimension in space.dimensions if dimension.name == "rows.lm_head")
    assert choice["rows.lm_head"] == min(heights, key=lambda rows: abs(int(rows) - 64))
    assert (choice["depth"], choice["threads"]) == (4, 512)
    unsaid = ("fuse.qkv", "fuse.mlp_in", "kv_block", "smem", "chunk")
    assert {name: choice[name] for name in unsaid} == {name: good[name] for name in unsaid}


def test_nearest_keeps_pinned_knobs_and_a_known_fusion() -> None:
    pinned = make_space(workload(), {"depth": "1"})
    config = ScheduleConfig(fusion_grouping=(("o_proj", "attn_add"),), pipelining_depth=8)
    choice = pinned.nearest(config)
    assert (choice["depth"], choice["fuse.out"], choice["fuse.qkv"]) == (1, 1, 0)
