"""Bundles on an emulated GPU: they decode what the ordinary path does, without torch, and refuse what is not theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulator.bundles import (
    ASKED,
    BATCH,
    CONTEXT,
    MADE,
    Given,
    loaded,
    make_files,
    program_of,
    remade,
    tokens_of,
    write_checkpoint,
)
from emulator.gpu import EmulatedGpu, build_variant
from emulator.sessions import emulated_session
from safetensors.torch import load_file, save_file

from flywheel.errors import BundleError, UsageError, WeightsError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.hf import load_spec
from flywheel.models.sharding import shared_step
from flywheel.runtime.reading import read_bundle
from flywheel.runtime.sequences import GREEDY
from flywheel.runtime.writing import bundle_files, write_folder
from flywheel.search.workload import Workload
from flywheel.vm.gpu.loader import LoadedProgram
from flywheel.vm.pack import pack, pack_ranks

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("held") / "small")


@pytest.fixture(scope="module")
def files(checkpoint: Path) -> dict[str, bytes]:
    return make_files(checkpoint, program_of(checkpoint))


@pytest.fixture
def bundle(files: dict[str, bytes], tmp_path: Path) -> Path:
    write_folder(tmp_path / "bundle", files)
    return tmp_path / "bundle"


@cache
def ordinary(checkpoint: Path, dtype: DType = DType.F32) -> list[list[int]]:
    """What follows each prompt where the program is lowered and packed here, and torch reads prompts. Its warps run in
    the plain order, which is a sixth of the work; those of bundles do not."""
    weights = {name: each.to(getattr(torch, {"F32": "float32", "BF16": "bfloat16"}[dtype.name]))
               for name, each in load_file(checkpoint / "model.safetensors").items()}  # fmt: skip
    spec = load_spec(checkpoint)
    with emulated_session(EmulatedGpu(seed=0), program_of(checkpoint, dtype), spec, weights) as session:
        found = []
        for prompt in ASKED:
            sequences = session.sequences()
            sequences.join(0, prompt, len(prompt) + MADE - 1, GREEDY)
            found.append([sequences.advance()[0].token for _ in range(MADE)])
            sequences.close()
    return found


def test_a_bundle_decodes_what_the_ordinary_path_does(bundle: Path, checkpoint: Path) -> None:
    with loaded(bundle, str(checkpoint)) as decoder:
        assert (decoder.max_sequences, decoder.device) == (BATCH, "cuda")
        assert "a schedule, of bundle" in decoder.schedule
        assert tokens_of(decoder) == ordinary(checkpoint)


def test_the_runtime_and_a_bundle_need_neither_torch_nor_optuna_nor_sqlalchemy(bundle: Path, checkpoint: Path) -> None:
    script = (
        "import json, pkgutil, sys\n"
        "from importlib import import_module\n"
        "for name in ('torch', 'optuna', 'sqlalchemy', 'alembic', 'numba', 'click'):\n"
        "    sys.modules[name] = None\n"
        "import flywheel.runtime as runtime\n"
        "names = [each.name for each in pkgutil.iter_modules(runtime.__path__, 'flywheel.runtime.')]\n"
        "print(len([import_module(name) for name in names]))\n"
        "from pathlib import Path\n"
        "from emulator.bundles import loaded, tokens_of\n"
        f"with loaded(Path({str(bundle)!r}), {str(checkpoint)!r}) as decoder:\n"
        "    print(json.dumps(tokens_of(decoder)))\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'safetensors', 'cuda', 'scipy', 'pandas'}))\n"
        "print([name for name in sys.modules if name.startswith(('flywheel.lowering', 'flywheel.search'))])\n"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules, tokens, *imported = done.stdout.splitlines()
    assert int(modules) > 4
    assert json.loads(tokens) == ordinary(checkpoint)
    assert imported == ["[]", "[]"]


def test_a_checkpoint_of_another_type_is_converted_as_torch_does(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small")
    write_folder(tmp_path / "bundle", make_files(checkpoint, program_of(checkpoint, DType.BF16)))
    with loaded(tmp_path / "bundle", str(checkpoint)) as decoder:
        assert tokens_of(decoder) == ordinary(checkpoint, dtype=DType.BF16)


def test_a_tied_checkpoint_that_holds_only_the_head_is_bundled(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(checkpoint / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, checkpoint / "model.safetensors")
    expected = ordinary(checkpoint)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, checkpoint / "model.safetensors")
    write_folder(tmp_path / "bundle", make_files(checkpoint, program_of(checkpoint)))
    with loaded(tmp_path / "bundle", str(checkpoint)) as decoder:
        assert tokens_of(decoder) == expected


def test_tensors_that_are_on_the_gpu_are_used_and_compared(bundle: Path, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    with loaded(bundle, {name: Given(each) for name, each in tensors.items()}) as decoder:
        assert tokens_of(decoder) == ordinary(checkpoint)
    name = "model.norm.weight"
    given = {key: Given(each) for key, each in tensors.items()}
    for changed, error, words in (
        (None, WeightsError, f"'{name}' is not given"),
        (Given(tensors[name].half()), WeightsError, r"is \[64\] in 128 bytes, not F32 \[64\]"),
        (Given(tensors[name] + 1), BundleError, f"'{name}' is not what it was made for"),
    ):
        other = {**given, name: changed} if changed is not None else {k: v for k, v in given.items() if k != name}
        with pytest.raises(error, match=words), loaded(bundle, other):
            pass


def test_all_bytes_of_tensors_on_the_gpu_are_compared_where_that_is_asked_for(
    bundle: Path, checkpoint: Path
) -> None:
    tensors = {name: Given(each) for name, each in load_file(checkpoint / "model.safetensors").items()}
    with loaded(bundle, tensors, check="all"):
        pass
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    manifest["weights"]["tensors"]["model.norm.weight"]["sha256"] = "0" * 64
    (bundle / "bundle.json").write_bytes(remade(manifest))
    with loaded(bundle, tensors):
        pass
    words = r"'model\.norm\.weight' is not what it was made for"
    with pytest.raises(BundleError, match=words), loaded(bundle, tensors, check="all"):
        pass
    unknown: Any = "every"
    with pytest.raises(UsageError, match="check: 'every' is not one of"), loaded(bundle, tensors, check=unknown):
        pass


def test_answers_begin_and_end_while_a_prompt_is_read(bundle: Path, checkpoint: Path) -> None:
    launches: list[int] = []
    launch = LoadedProgram.launch

    def counted(program: LoadedProgram, pos: int | None = None, positions: int = 0) -> None:
        launches.append(pos or 0)
        launch(program, pos, positions)

    with patch.object(LoadedProgram, "launch", counted), loaded(bundle, str(checkpoint)) as decoder:
        long = decoder.submit([1] * 12, max_tokens=1)
        decoder.advance()
        assert (launches, long.ready()) == ([0], [])
        short = decoder.submit(ASKED[1], max_tokens=1)
        decoder.advance()
        assert (launches, len(short.ready())) == ([0, 1], 1)
        decoder.cancel(long)
        decoder.advance()
        assert launches == [0, 1]


@pytest.mark.parametrize("check", ["samples", "all"])
def test_changed_weights_are_refused_by_name(check: Any, bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][-1, -1] += 1
    (tmp_path / "other").mkdir()
    save_file(tensors, str(tmp_path / "other" / "model.safetensors"))
    words = f"'{name}' of .*other is not what it was made for"
    with pytest.raises(BundleError, match=words), loaded(bundle, str(tmp_path / "other"), check=check):
        pass


def test_another_gpu_and_an_old_driver_are_refused(bundle: Path, checkpoint: Path) -> None:
    for gpu, words in (
        (EmulatedGpu(num_sms=8), r"made for here \(sm_90, 4 SMs\); emulated here is sm_90 with 8 SMs"),
        (EmulatedGpu(sm_arch=80), "emulated here is sm_80"),
        (EmulatedGpu(cuda_version="11.8"), r"its kernel needs CUDA \d+\.\d; the driver here supports CUDA 11\.8"),
    ):
        with pytest.raises(BundleError, match=words), loaded(bundle, str(checkpoint), gpu):
            pass


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("tables.bin", flipped, "tables.bin is damaged: its SHA-256 is not the one in bundle.json"),
        ("kernel.cubin", lambda data: data[:-1], r"kernel.cubin is damaged: \d+ bytes, not \d+"),
        ("labels.json", None, "labels.json cannot be read: No such file"),
        ("bundle.json", lambda data: data.replace(b'"grid": 4', b'"grid": 5'), "is damaged: its digest differs"),
        ("bundle.json", lambda data: data[:100], "bundle.json cannot be read"),
        ("bundle.json", lambda data: b"[]", "bundle.json is not of format flywheel-bundle"),
        ("bundle.json", lambda data: remade({**json.loads(data), "version": 2}), "version 2 is not 1, which"),
        ("bundle.json", lambda data: remade({**json.loads(data), "abi": "x"}), "another flywheel version"),
        ("bundle.json", lambda data: remade({**json.loads(data), "buffers": [{}]}), "lacks or misstates"),
    ],
)  # fmt: skip
def test_damage_is_named(
    name: str, damage: Callable[[bytes], bytes] | None, words: str, bundle: Path, checkpoint: Path
) -> None:
    if damage is None:
        (bundle / name).unlink()
    else:
        (bundle / name).write_bytes(damage((bundle / name).read_bytes()))
    with pytest.raises(BundleError, match=words), loaded(bundle, str(checkpoint)):
        pass


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("abi",), None, "misstates abi: NoneType is not of str"),
        (("files",), [], "misstates files: list is not of dict"),
        (("files", "tables.bin"), {}, r"files.tables.bin.bytes: is missing"),
        (("files", "a\0b"), {"bytes": 1, "sha256": ""}, "is missing"),
        (("files", "../small/config.json"), {"bytes": 1, "sha256": ""}, "is missing"),
        (("files", "big"), {"bytes": 2**40, "sha256": ""}, "more than 1,073,741,824"),
        (("tables", "queues", "count"), -1, "tables.queues.count: -1 is not of int, or out of range"),
        (("tables", "queues", "count"), 2**63, "tables.queues.count: 9223372036854775808 is not"),
        (("tables", "queues", "count"), 4, "tables.queues: 4 rows, not 5"),
        (("tables", "segment_buffers", "offset"), 0, "names a buffer that is not one of"),
        (("kernel", "nvrtc"), "new", "kernel.nvrtc: 'new' is not a version"),
        (("kernel", "entries"), {}, "kernel.entries.megakernel: is missing"),
        (("variant", "formats"), [[]], "variant.formats: list is not of int"),
        (("target", "name"), [], "target.name: list is not of str"),
        (("variant", "ring_slots"), 0, "inflight_chunks"),
        (("model", "spec", "rope_theta"), "x", "model.spec lacks or misstates"),
        (("model", "spec", "name"), "\ud800", "model.spec.name: .* is not of str"),
        (("model", "batch"), 3, "token_id is"),
        (("model", "context"), 2**20, "model.context: 1048576 is not in 1..32"),
        (("program", "numbers", "n_counters"), 2**60, "n_counters: 1152921504606846976 is not"),
        (("program", "numbers", "set_stride"), 0, "is not in the arena of 0 bytes"),
        (("buffers", 0, "offset"), None, "buffers.0.offset: NoneType is not of int"),
        (("weights", "tensors"), {}, "is no tensor of weights.tensors"),
        (("schedule", "words"), {}, "schedule.words: dict is not of str"),
    ],
)  # fmt: skip
def test_what_a_whole_bundle_misstates_is_named(
    place: tuple[Any, ...], value: object, words: str, bundle: Path, checkpoint: Path
) -> None:
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    part = manifest
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (bundle / "bundle.json").write_bytes(remade(manifest))
    with pytest.raises(BundleError, match=words) as raised, loaded(bundle, str(checkpoint)):
        pass
    assert "\n" not in str(raised.value)


def test_a_pipe_in_the_place_of_a_bundles_file_is_not_waited_for(bundle: Path, checkpoint: Path) -> None:
    (bundle / "tables.bin").unlink()
    os.mkfifo(bundle / "tables.bin")
    with pytest.raises(BundleError, match=r"tables\.bin is not a regular file"), loaded(bundle, str(checkpoint)):
        pass


def test_what_a_bundle_settles_cannot_be_asked_for(bundle: Path, checkpoint: Path) -> None:
    for asked in ({"context": 16}, {"gpu": "h100"}, {"device": "reference"}):
        words = f"{next(iter(asked))} is fixed by the bundle"
        with pytest.raises(BundleError, match=words), loaded(bundle, str(checkpoint), **asked):
            pass
    with pytest.raises(BundleError, match="has no weights"), loaded(bundle, None):
        pass


def test_the_same_program_gives_the_same_bytes_and_nothing_is_written_over(
    bundle: Path, files: dict[str, bytes], checkpoint: Path, tmp_path: Path
) -> None:
    assert make_files(checkpoint, program_of(checkpoint)) == files
    with pytest.raises(UsageError, match="exists; a bundle needs a new directory"):
        write_folder(bundle, files)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bundle"]


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_folder(tmp_path / "bundle", {"a": b"1", "b/c/d": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_has_every_file_of_the_tokenizer_and_is_read_with_them(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    names = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates/tool_use.jinja")
    (copy / "additional_chat_templates").mkdir()
    for name in names:
        (copy / name).write_text("{}")
    write_folder(tmp_path / "bundle", make_files(copy, program_of(copy)))
    assert all((tmp_path / "bundle" / name).read_text() == "{}" for name in names)
    assert set(names) <= set(read_bundle(tmp_path / "bundle").manifest["files"])


def test_a_program_of_several_ranks_is_refused_and_so_is_the_part_of_one(checkpoint: Path) -> None:
    target = replace(TARGETS["h100"], num_sms=2)
    config = ScheduleConfig(page_allocation="none", threads_per_block=192)
    program = lower(shared_step(load_spec(checkpoint), CONTEXT, DType.F32, BATCH, ranks=2), config, target)
    refusal = "^bundle: a program of 2 ranks; bundles are of one rank$"
    with pytest.raises(UsageError, match=refusal):
        make_files(checkpoint, program)
    for packed in pack_ranks(program):
        kernel: Any = None  # of which a refusal asks nothing
        with pytest.raises(UsageError, match=refusal):
            bundle_files(packed, kernel, "12.9", {}, {}, {})


def test_a_program_of_several_lanes_is_refused(checkpoint: Path) -> None:
    """Nothing in a bundle says how many lanes a sequence has, so its reader would not know its buffers."""
    lanes = decode_step(load_spec(checkpoint), CONTEXT, DType.F32, 4, lanes=4)
    program = lower(lanes, ScheduleConfig(threads_per_block=192), replace(TARGETS["h100"], num_sms=2))
    refusal = "^bundle: a program of 4 lanes a sequence; bundles are of one lane$"
    with pytest.raises(UsageError, match=refusal):
        make_files(checkpoint, program)
    kernel: Any = None  # of which a refusal asks nothing
    with pytest.raises(UsageError, match=refusal):
        bundle_files(pack(program), kernel, "12.9", {}, {}, {})


def experiment(name: str) -> Any:
    with patch.object(sys, "path", [str(TESTS.parent / "experiments"), *sys.path]):
        return import_module(name)


def test_the_script_that_times_loading_loads_and_compiles_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing, program = experiment("load_speed"), program_of(checkpoint)
    assert program.target is not None
    assert program.config is not None
    workload = Workload("small", load_spec(checkpoint), program.target, "f32", CONTEXT)
    tensors = timing.weights_on(workload, "cpu")
    seen = timing.known(tensors, DType.F32)
    write_folder(tmp_path / "bundle", timing.make(workload, program.config, seen, build_variant))
    timing.load(EmulatedGpu(), tmp_path / "bundle", tensors, 1)
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in shown[:2]] == ["small on here", "emulated"]
    assert shown[2].startswith("bar: 0.5 s ")


def test_another_engine_runs_a_bundle_by_its_document(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "bundle", make_files(checkpoint, program_of(checkpoint, batch=1)))
    run = experiment("run_bundle").run
    found = [run(EmulatedGpu(), tmp_path / "bundle", checkpoint, list(prompt), MADE) for prompt in ASKED]
    assert found == ordinary(checkpoint)
    script = TESTS.parent / "experiments" / "run_bundle.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60


def test_a_bundle_names_the_tasks_of_its_program(bundle: Path, checkpoint: Path) -> None:
    program, packed = program_of(checkpoint), read_bundle(bundle).packed
    assert [packed.label(place) for place in range(len(packed.program.tasks))] == [
        f"task {task.id} ({task.label})" for task in program.tasks
    ]


def test_memory_is_given_back(bundle: Path, checkpoint: Path) -> None:
    gpu = EmulatedGpu()
    with loaded(bundle, str(checkpoint), gpu) as decoder:
        assert decoder.complete(ASKED[1], max_tokens=1).token_ids
        assert gpu._held
    assert not gpu._held
