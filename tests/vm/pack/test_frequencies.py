from __future__ import annotations

import numpy as np
import pytest
import torch

from flywheel.vm.pack.frequencies import Frequencies, inverse_frequencies
from flywheel.vm.reference.attention import inverse_frequencies as reference

LLAMA = (8.0, 1.0, 4.0, 8192.0)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("scaling", [(), LLAMA, (32.0, 1.0, 1.0, 64.0)])
def test_frequencies_are_those_of_the_reference(head_dim: int, theta: float, scaling: tuple[float, ...]) -> None:
    wanted = reference(head_dim, theta, scaling, torch.device("cpu")).numpy()
    made = inverse_frequencies(head_dim, theta, scaling)
    assert made.dtype == np.float32 and len(made) == head_dim // 2
    np.testing.assert_array_max_ulp(made, wanted, maxulp=1)


def test_steps_that_rotate_alike_share_a_table() -> None:
    frequencies = Frequencies()
    plain = {"head_dim": 8, "theta": 1e4}
    names = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position")
    scaled = plain | dict(zip(names, LLAMA, strict=True))
    offsets = [frequencies.offset(params) for params in (plain, scaled, dict(plain), {**plain, "theta": 5e5})]
    assert offsets == [0, 4, 0, 8]
    assert np.array_equal(frequencies.table()[4:8], inverse_frequencies(8, 1e4, LLAMA))


def test_a_table_of_a_program_stands_as_it_is() -> None:
    frequencies = Frequencies()
    table = {"head_dim": 8, "frequencies": (1.0, 0.1, 0.25, 0.0)}
    offsets = [frequencies.offset(params) for params in ({"head_dim": 4, "theta": 1e4}, table, dict(table))]
    assert offsets == [0, 2, 2]
    assert frequencies.table()[2:].tolist() == [1.0, np.float32(0.1), 0.25, 0.0]
