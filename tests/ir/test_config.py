from __future__ import annotations

import pytest

from flywheel.errors import IrFormatError
from flywheel.ir import ScheduleConfig, config_from_dict, config_to_dict

FULL = ScheduleConfig(
    tiling={"gemv": {"N_tile": 32}, "gemv.down_proj": {"N_tile": 16}},
    fusion_grouping=(("norm", "qkv"), ("o", "residual")),
    sm_assignment={3: 1, 10: 2},
    pipelining_depth=4,
    page_allocation="linear",
    threads_per_block=512,
    smem_bytes_per_block=65536,
)


def test_defaults_are_the_formats() -> None:
    assert config_to_dict(ScheduleConfig()) == {
        "tiling": {},
        "fusion_grouping": [],
        "sm_assignment": "load_balance",
        "pipelining_depth": 2,
        "page_allocation": "none",
        "threads_per_block": 256,
        "smem_bytes_per_block": 0,
    }
    assert config_from_dict({}) == ScheduleConfig()


def test_an_explicit_assignment_has_string_keys_in_files_and_int_keys_in_memory() -> None:
    assert config_to_dict(FULL)["sm_assignment"] == {"3": 1, "10": 2}
    assert config_from_dict(config_to_dict(FULL)) == FULL


def test_ids_are_stable_and_tell_configs_apart() -> None:
    assert ScheduleConfig().config_id == "992cd90eeea7"
    assert config_from_dict(config_to_dict(FULL)).config_id == FULL.config_id
    assert FULL.config_id != ScheduleConfig().config_id
    assert ScheduleConfig(tiling={"a": {"x": 1}, "b": {"y": 2}}).config_id == (
        ScheduleConfig(tiling={"b": {"y": 2}, "a": {"x": 1}}).config_id
    )


def test_something_that_is_no_config_is_a_format_error() -> None:
    for data in (None, [], {"tiling": []}, {"threads_per_block": "256"}):
        with pytest.raises(IrFormatError):
            config_from_dict(data)
