from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
import torch
from interpreted import interpret, product
from torch import Tensor

from flywheel.ir import DType
from flywheel.models.formats import parse_formats
from flywheel.models.quantise import dequantise, quantise
from flywheel.rivals.products import Coded, Words, multiply, parts_of
from flywheel.rivals.triton_product import CONFIGS, _product, chosen_configs, launch, pack_words
from flywheel.vm.gpu.driver import Gpu

# Rows and columns, as slices of rows of llama3-8b and qwen2.5-7b, and sizes that fill no block.
SHAPES = [(40, 4096), (24, 14336), (16, 3584), (8, 18944), (33, 640), (1, 128), (70, 512), (9, 896)]
FORMATS = ["int4", "int4-zeros", "int4-g256", "int4-g256-zeros", "int4-g128-f32"]
DTYPES = {"bf16": (DType.BF16, torch.bfloat16), "f16": (DType.F16, torch.float16)}


def case(shape: tuple[int, int], rows: int, text: str, name: str, device: str = "cpu") -> tuple[Tensor, Coded]:
    """x [rows, K] and a matrix, whose rows and groups have scales of their own."""
    dtype, stored = DTYPES[name]
    own = parse_formats(text, name).usual
    assert own is not None
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randn(shape, generator=generator) + torch.randn((shape[0], 1), generator=generator)
    drawn *= torch.rand((shape[0], shape[1] // 128, 1), generator=generator).expand(-1, -1, 128).reshape(shape)
    coded = Coded(*(None if each is None else each.to(device) for each in quantise(drawn, own, dtype)))  # type: ignore[arg-type]
    return torch.randn((rows, shape[1]), generator=generator).to(device, stored), coded


def check(made: Tensor, x: Tensor, matrix: Coded) -> None:
    """Compare with a product in float64. A result is rounded once, and its sum may be off by float32's rounding of what
    the codes' offset adds."""
    wide = dequantise(matrix.codes, matrix.scales, matrix.zeros, torch.float64)
    wanted, sizes = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    allowed = wanted.abs() * torch.finfo(x.dtype).eps + sizes * 2e-4
    assert made.dtype == x.dtype
    assert made.shape == wanted.shape
    assert bool(((made.double() - wanted).abs() <= allowed).all())


def cases() -> list[tuple[tuple[int, int], int, str, str, int]]:
    """Each shape with zero points and without; all batches, formats, types and configurations in turn."""
    shapes = [shape for shape in SHAPES for _ in range(2)]
    batches, names = cycle([1, 2, 3, 4, 5, 6, 7, 8]), cycle(["bf16", "bf16", "f16"])
    formats = cycle(["int4", "int4-zeros", "int4-g128-f32", "int4-zeros"])
    found = []
    for number, each in enumerate(zip(shapes, batches, formats, names, strict=False)):
        shape, batch, text, name = each
        if shape[1] % 256 == 0 and number % 5 == 0:
            text = text.replace("-g128", "").replace("int4", "int4-g256")
        found.append((shape, batch, text, name, number % len(CONFIGS)))
    return found


@pytest.mark.parametrize(("shape", "rows", "text", "name", "config"), cases())
def test_a_product_of_words_is_that_of_what_the_codes_mean(
    shape: tuple[int, int], rows: int, text: str, name: str, config: int
) -> None:
    interpret()
    x, matrix = case(shape, rows, text, name)
    check(product(x, pack_words(matrix), config), x, matrix)


def test_the_cases_have_every_batch_format_and_configuration() -> None:
    found = cases()
    assert {rows for _, rows, *_ in found} == set(range(1, 9))
    assert {config for *_, config in found} == set(range(len(CONFIGS)))
    assert {text for _, _, text, *_ in found} == set(FORMATS)


@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
def test_another_matrix_has_another_product(part: str) -> None:
    interpret()
    x, matrix = case((16, 1024), 1, "int4-zeros", "bf16")
    made = product(x, pack_words(matrix), 0)
    changed = {name: getattr(matrix, name).clone() for name in ("codes", "scales", "zeros")}
    changed[part][5, -1] = 1 if part == "scales" else changed[part][5, -1] ^ 1
    unlike = product(x, pack_words(Coded(**changed)), 0) != made
    assert unlike.nonzero().tolist() == [[0, 5]]


def test_rows_that_are_packed_in_pieces_are_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _, matrix = case((100, 640), 1, "int4-zeros", "bf16")
    whole = pack_words(matrix)
    monkeypatch.setattr("flywheel.rivals.triton_product._AT_ONCE", 640 * 20)
    assert all(map(torch.equal, parts_of(pack_words(matrix)), parts_of(whole)))


def test_a_matrix_of_whole_blocks_takes_no_more_bytes_than_its_codes() -> None:
    _, matrix = case((64, 1536), 1, "int4", "bf16")
    words = pack_words(matrix)
    assert sum(part.nbytes for part in parts_of(words)) == sum(part.nbytes for part in parts_of(matrix))


def test_the_fastest_configuration_is_chosen_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret()
    monkeypatch.setattr(_product, "cache", {})
    times = iter([3.0, 2.0, 4.0, 3.0, 3.0, 2.0, 1.0, 3.0])

    def timed(run: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
        run()
        return [next(times)] * len(quantiles)

    monkeypatch.setattr(_product, "_do_bench", timed)
    x, matrix = case((40, 640), 3, "int4-zeros", "bf16")
    for _ in range(2):
        check(launch(_product, x, pack_words(matrix), {}), x, matrix)
    assert next(times, None) is None
    assert chosen_configs(3) == ("40 x 640 by 32 rows, 4 warps, 2 stages",)
    assert chosen_configs(4) == ()


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flywheel.rivals.triton_product import CONFIGS, _product_kernel

pointers = {"x_ptr": "*bf16", "words_ptr": "*i32", "scales_ptr": "*bf16", "zeros_ptr": "*i8", "made_ptr": "*bf16"}
constants = {"ROWS_OF_X": 4, "HAS_ZEROS": True, "OFFSET": 136}
for arch, config in ((80, CONFIGS[0]), (90, CONFIGS[-2])):
    values = {**constants, **config.kwargs}
    signature = {**pointers, **dict.fromkeys(("magic", "height", "width"), "i32"), **dict.fromkeys(values, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 4, 6, 7)}
    source = ASTSource(_product_kernel, signature, values, aligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    print(arch, made.asm["ptx"].count("mma.sync"), made.metadata.shared, len(made.asm["cubin"]))
"""


@pytest.mark.long
def test_the_kernel_compiles_for_two_architectures_and_no_number_of_the_matrix_changes_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without stages of loads, shared memory holds what each of 4 warps multiplies, and nothing else: 128 columns of x
    in 8 rows. With two, also the words of a load."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    x, words = 4 * 128 * 8 * 2, 4 * 4 * 512 * 4
    for line, (arch, most) in zip(run.stdout.splitlines(), ((80, x), (90, 4 * x + words + 1024)), strict=True):
        found, products, shared, nbytes = map(int, line.split())
        assert (found, products > 0, nbytes > 0) == (arch, True, True)
        assert shared <= most


@pytest.mark.gpu
@pytest.mark.parametrize("rows", range(1, 9))
def test_on_a_gpu_every_configuration_has_the_same_product_and_one_is_chosen(rows: int, gpu: Gpu) -> None:
    shape, text, name = [
        ((4096, 4096), "int4", "bf16"), ((3584, 18944), "int4-zeros", "bf16"), ((4608, 3584), "int4", "f16"),
        ((1000, 640), "int4-zeros", "bf16"),
    ][rows % 4]  # fmt: skip
    x, matrix = case(shape, rows, text, name, "cuda")
    words = pack_words(matrix)
    for config in range(len(CONFIGS)):
        check(product(x, words, config), x, matrix)
    check(multiply(x, words), x, matrix)
    assert any(each.startswith(f"{shape[0]} x {shape[1]} by ") for each in chosen_configs(rows))
    assert isinstance(words, Words)
