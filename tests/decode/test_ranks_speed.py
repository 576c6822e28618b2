"""experiments/ranks_speed.py, which times on several GPUs what it judges here on CPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from flywheel.errors import MismatchError
from flywheel.measure.verdict import judge
from flywheel.models.catalog import CATALOG

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "ranks_speed.py"
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 33, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 120,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = spec_from_file_location("ranks_speed", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    sys.modules["ranks_speed"] = module  # its dataclasses look their module up
    found.loader.exec_module(module)
    return module


def test_ranks_on_cpus_are_judged_and_not_timed(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    output = tmp_path / "ranks.txt"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--context", "48", "--output", str(output)]
    done = subprocess.run(
        [*command, "--models", str(tmp_path / "tiny"), "llama4-tiny"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, "a model of an unknown name fails alone"
    assert "llama4-tiny" in done.stderr.splitlines()[-1]
    rows = output.read_text(encoding="utf-8").splitlines()[2:]
    assert [row.split()[1:6] for row in rows] == [["2", kind, "32", "of", "33"] for kind in ("cublas", "compile")]
    assert all(row.endswith("not timed") for row in rows)
    assert done.stdout == output.read_text(encoding="utf-8")


def test_a_rounds_time_is_the_slowest_ranks_and_the_prediction_has_a_column(script: ModuleType) -> None:
    passed = judge(error=0.001, where="logits", positions=(511,), dtype="BF16")
    ask = script.Ask(CATALOG["llama3-8b"], 2, 512, "cuda")
    times = ([1.0, 2.0, 6.0], [4.0, 1.5, 5.0])
    found = [
        script.Found(dict.fromkeys(script.KINDS, passed), dict.fromkeys(script.KINDS, "d"),
                     dict.fromkeys(script.KINDS, each))
        for each in times
    ]  # fmt: skip
    for row in script.rows_of(ask, found):
        assert "4.000 (2.000 to 6.000)" in row
        assert row.split()[-1] == f"{script.predicted_ms(script.PREDICTED.read_text(), 'llama3-8b', 2):.3f}"
    other = dataclasses.replace(found[1], digests=dict.fromkeys(script.KINDS, "e"))
    with pytest.raises(MismatchError, match="llama3-8b: cublas: the logits of 2 ranks are not the same"):
        script.rows_of(ask, [found[0], other])
    failed = judge(error=1.0, where="logits", positions=(511,), dtype="BF16")
    wrong = dataclasses.replace(found[1], verdicts=dict.fromkeys(script.KINDS, failed))
    with pytest.raises(MismatchError, match="llama3-8b: cublas on 2 ranks: "):
        script.rows_of(ask, [found[0], wrong])


def test_the_oracle_judges_as_many_layers_as_a_gpu_holds(script: ModuleType) -> None:
    judged = {name: script.judged_layers(CATALOG[name]) for name in ("llama3.2-1b", "llama3-8b", "llama3-70b")}
    assert judged == {"llama3.2-1b": 16, "llama3-8b": 32, "llama3-70b": 9}
    assert script.predicted_ms("llama3-70b 2 1 2.0 17.110 0.088\n", "llama3-70b", 4) is None
