"""Tensors of a stranger's checkpoint, read without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.errors import WeightsError
from flywheel.runtime.weights import open_stored


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": []},
        {"dtype": "F64"},
        {"shape": ["a"]},
        {"shape": [-2, -1]},
        {"shape": [2.0]},
        {"shape": [[2]]},
        {"shape": 2},
        {"data_offsets": ["a", "b"]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": [0, 2**80]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [8, 16]},
        {"data_offsets": [0]},
    ],
)  # fmt: skip
def test_a_malformed_tensor_is_refused_in_one_line_that_names_it(changed: dict[str, object], tmp_path: Path) -> None:
    about = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}
    header = json.dumps({"norm": about}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WeightsError, match=r"norm|model\.safetensors") as raised:
        open_stored(tmp_path, ["norm"])
    assert "\n" not in str(raised.value)
