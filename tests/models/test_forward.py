"""What prefill and the rivals compute alike."""

from __future__ import annotations

import pytest
import torch

from flywheel.ir import DType, InstructionKind
from flywheel.models.calls import Call
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.forward import PLAIN, rope_turns, rotate, turning_of
from flywheel.models.oracle import rope_table


@pytest.mark.parametrize("name", CATALOG)
def test_angles_are_the_oracles_for_every_known_model(name: str) -> None:
    spec = CATALOG[name]
    graph = decode_step(spec, 1, DType.BF16)
    layers = {(spec.rope_of(layer), spec.of_layer(layer)): None for layer in range(spec.n_layers)}
    ropes = [each for each in layers if each[0] is not None]
    for (rope, spec), turning in zip(ropes, turning_of(graph).values(), strict=True):
        torch.testing.assert_close(turning, rope_table(rope, spec, False), rtol=5e-7, atol=0.0)
        cosines, sines = rope_turns(torch.arange(64), turning)
        angles, half = torch.outer(torch.arange(64).float(), turning[0]), spec.head_dim // 2
        assert torch.equal(cosines[:, 0], (angles.cos() * turning[1]).repeat(1, 2))
        assert torch.equal(sines[:, 0, half:], angles.sin() * turning[1])
        assert torch.equal(sines[:, 0, :half], -angles.sin() * turning[1])


def test_a_rotation_turns_pairs_half_a_head_apart() -> None:
    x = torch.randn(3, 2 * 8)
    turning = torch.tensor([[1.0, 0.5, 0.25, 0.125], [1.0] * 4])
    cosines, sines = rope_turns(torch.tensor([0, 5, 9]), turning)
    made = rotate(x, cosines, sines).view(3, 2, 8)
    angles = torch.outer(torch.tensor([0.0, 5.0, 9.0]), torch.tensor([1.0, 0.5, 0.25, 0.125]))[:, None]
    low, high = x.view(3, 2, 8).chunk(2, -1)
    turned = torch.complex(low, high) * torch.polar(torch.ones(()), angles)
    torch.testing.assert_close(made, torch.cat((turned.real, turned.imag), -1))


def test_a_norm_narrower_than_its_input_is_of_each_head() -> None:
    x, weight = torch.randn(2, 3 * 4), torch.randn(4)
    call = Call(InstructionKind.RMSNORM, ("q_norm",), {"hidden": 4, "eps": 1e-6}, (), (), "q_normed")
    made = PLAIN[call.kind](call, [x], [weight]).view(2, 3, 4)
    heads = x.view(2, 3, 4)
    torch.testing.assert_close(made, heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight)
