from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from setuptools import Distribution

from flywheel.ir import InstructionKind
from flywheel.plan import kernels
from flywheel.vm import abi, abi_codegen


def test_the_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flywheel.vm.abi_codegen", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", abi_codegen.FILES)
def test_a_file_that_drifted_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    abi_codegen.write(tmp_path)
    assert abi_codegen.drifted(tmp_path) == []
    (tmp_path / name).write_text((tmp_path / name).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["abi_codegen", "--check"])
    assert abi_codegen.main(tmp_path) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"{name}: ") and line.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["abi_codegen"])
    assert abi_codegen.main(tmp_path) == 0
    assert abi_codegen.drifted(tmp_path) == []


def test_every_opcode_but_two_has_a_kernel() -> None:
    without = {InstructionKind.NOP, InstructionKind.FUSED}
    assert kernels.KERNELS.keys() == set(InstructionKind) - without


def test_every_kernel_is_in_the_header_of_its_name() -> None:
    for kernel in kernels.KERNELS.values():
        header = abi_codegen.CUDA / "ops" / f"{kernel.name}.cuh"
        assert f" op_{kernel.name}(Vm" in header.read_text(encoding="utf-8")


def test_no_struct_has_padding() -> None:
    for name, members in abi.STRUCTS.items():
        layout = abi.numpy_struct(name)
        sizes = [abi.CTYPES[each.type][1] if each.type in abi.CTYPES else abi.numpy_struct(each.type).itemsize
                 for each in members]  # fmt: skip
        sizes = [size * each.count for size, each in zip(sizes, members, strict=True)]
        assert layout.itemsize == (max(sizes) if name in abi.UNIONS else sum(sizes))
        assert layout.itemsize % 4 == 0


def test_what_a_step_s_kind_has_lies_over_the_same_words() -> None:
    table = np.zeros(3, abi.numpy_struct("amk_step_t"))
    table["as"]["product"]["kblocks"][1] = 7
    assert table["as"]["rope"]["value"].tolist() == table["as"]["softmax"]["n"].tolist() == [0, 7, 0]
    assert table[:2].nbytes == 256 and {kernel.step for kernel in kernels.KERNELS.values()} == {
        member.name for member in abi.STRUCTS["amk_step_kind_t"]
    }


def test_instructions_and_steps_are_copied_in_16_byte_words() -> None:
    assert abi.numpy_struct("amk_instruction_t").itemsize % 16 == 0
    assert abi.numpy_struct("amk_step_t").itemsize % 16 == 0


def test_cuda_sources_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    distribution.include_package_data = False  # what the manifest adds is for checkouts alone
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    installed = {Path(source, name) for _, source, _, names in command.data_files for name in names}
    sources = {
        path.relative_to(root)
        for suffix in ("cu", "cuh", "h")
        for path in (root / "flywheel" / "vm" / "cuda").rglob(f"*.{suffix}")
    }
    assert len(sources) > len(kernels.KERNELS.values())
    assert sources <= installed
