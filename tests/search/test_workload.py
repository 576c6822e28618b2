from __future__ import annotations

import pytest

from flywheel.errors import ConfigError, UnknownNameError
from flywheel.ir import TARGETS
from flywheel.models.catalog import CATALOG
from flywheel.search.workload import Workload, find_target, make_workload


def test_names_become_records() -> None:
    workload = make_workload("llama3-8b", "h100", "f16", 512)
    assert (workload.spec, workload.target) == (CATALOG["llama3-8b"], TARGETS["h100"])
    assert workload.graph.context == 512
    assert workload.graph.dtype.name == "F16"


def test_contexts_and_dtypes_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^llama3-8b: context 8193 is not in 1\.\.8192$"):
        make_workload("llama3-8b", "h100", "bf16", 8193)
    with pytest.raises(UnknownNameError, match=r"^dtype 'int4' is not one of bf16, f16, f32$"):
        Workload("m", CATALOG["llama3-8b"], TARGETS["h100"], "int4", 8)


def test_unknown_gpus_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"^GPU 'h1000' is not one of a100, .*rtx5090.*, generic$"):
        find_target("h1000")
