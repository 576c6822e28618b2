from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
GRAPHS = Path(__file__).parents[1] / "interop" / "mpk" / "graphs"


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], str]:
    """The path of a sample's file."""

    def unpack(name: str) -> str:
        path = tmp_path / f"{name}.json"
        path.write_bytes(lzma.decompress((GRAPHS / f"{name}.json.xz").read_bytes()))
        return str(path)

    return unpack


def test_a_safe_graph_is_accepted(run: Run, unpacked: Callable[[str], str]) -> None:
    result = run("mpk", "check", unpacked("micro_2layer"))
    assert result.exit_code == 0
    assert "ACCEPTED" in result.stdout


def test_two_ranks_are_judged_together_and_their_races_are_named(run: Run, unpacked: Callable[[str], str]) -> None:
    result = run("mpk", "check", unpacked("micro_2gpu_r0"), unpacked("micro_2gpu_r1"), "--workers", "4", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert (document["ok"], document["stats"]["ranks"], document["stats"]["workers"]) == (False, 2, 4)
    assert {error["code"] for error in document["errors"]} == {"race-read"}
    assert all("all_reduce_buf" in error["message"] for error in document["errors"])


def test_a_file_that_is_none_is_unreadable_in_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "junk.json"
    path.write_bytes(b"\xff")
    result = run("mpk", "check", str(path), str(tmp_path / "missing.json"))
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert [line for line in lines if "[unreadable]" in line] == lines[1:]
    assert len(lines) == 3


@pytest.mark.parametrize("action", [("repair",), ("search", "--trials", "1", "--workers", "96")])
def test_the_directory_of_new_files_is_made(
    action: tuple[str, ...], run: Run, unpacked: Callable[[str], str], tmp_path: Path
) -> None:
    result = run("mpk", action[0], unpacked("micro_2layer"), *action[1:], "-o", tmp_path / "made" / "here")
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "made" / "here" / "micro_2layer.json").read_text(encoding="utf-8"))


def test_a_file_or_stdout_is_no_directory_of_new_files(
    run: Run, unpacked: Callable[[str], str], tmp_path: Path
) -> None:
    path = unpacked("micro_2layer")
    for output, fact in ((path, "no directory, and cannot be made one"), ("-", "is stdout")):
        result = run("mpk", "repair", path, "-o", output)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert fact in result.stderr


def test_a_name_of_the_same_memory_can_be_given(run: Run, unpacked: Callable[[str], str]) -> None:
    path = unpacked("micro_2layer")
    assert run("mpk", "check", path, "--alias", "mlp_mid=rmsnorm_out").exit_code == 3


def test_inspect_counts_tasks_by_type(run: Run, unpacked: Callable[[str], str]) -> None:
    path = unpacked("exp_mla")
    document = json.loads(run("mpk", "inspect", path, "--json").stdout)
    (facts,) = document["graphs"]
    assert (facts["tasks"], facts["schema"], facts["launch"]) == (366, 2026, "ahead of time")
    assert {row["type"]: row["tasks"] for row in facts["types"]}["MLA_MTP_REDUCE_SM100"] == 256
    assert "MLA_KV_GATHER_SM100" in run("mpk", "inspect", path).stdout


def test_predict_prints_the_waits_and_writes_a_trace_and_a_picture(
    run: Run, unpacked: Callable[[str], str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    picture = tmp_path / "layer.svg"
    result = run("mpk", "predict", unpacked("tiny"), "--trace", str(trace), "--picture", str(picture))
    assert result.exit_code == 0
    assert "predicted" in result.stdout and "waits" in result.stdout and "hand-off to" in result.stdout
    drawn = picture.read_text(encoding="utf-8")
    assert "layer 1 on every worker" in drawn and "a row is a worker" in drawn
    assert "…" not in drawn
    assert 'class="state stage"' in drawn and 'class="state starve"' in drawn and 'class="state multiply"' not in drawn
    assert len(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]) > 980
    document = json.loads(run("mpk", "predict", unpacked("tiny"), "--json").stdout)
    assert document["prediction"]["latency_us"] > document["prediction"]["floor_us"] > 0
    assert {row["type"] for row in document["hand_offs"]} == {row["type"] for row in document["types"]}


def test_predict_takes_all_ranks_and_shows_the_slowest(
    run: Run, unpacked: Callable[[str], str], tmp_path: Path
) -> None:
    given = [unpacked("micro_2gpu_r0"), unpacked("micro_2gpu_r1")]
    assert run("mpk", "repair", *given, "-o", str(tmp_path / "mended")).exit_code == 0
    files = [str(tmp_path / "mended" / Path(path).name) for path in given]
    document = json.loads(run("mpk", "predict", *files, "--json").stdout)
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    slowest = max(document["ranks"], key=lambda row: row["latency_us"])
    assert document["prediction"]["latency_us"] == slowest["latency_us"]
    assert document["prediction"]["rank"] == slowest["rank"]
    assert "the slowest" in run("mpk", "predict", *files).stdout


def test_a_number_of_workers_beyond_the_runtimes_is_refused_with_the_bound(
    run: Run, unpacked: Callable[[str], str]
) -> None:
    result = run("mpk", "check", unpacked("micro_2layer"), "--workers", "161")
    assert result.exit_code == 3
    assert "[bad-workers] 161 workers; MPK's runtime takes 1..160" in result.stdout


def test_a_byte_order_mark_is_refused_in_plain_words(run: Run, unpacked: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_bytes(b"\xef\xbb\xbf" + Path(unpacked("micro_2layer")).read_bytes())
    result = run("mpk", "check", str(path))
    assert result.exit_code == 3
    assert "begins with a byte-order mark; want UTF-8 without one" in result.stdout
    assert "utf-8-sig" not in result.stdout


@pytest.mark.parametrize("alias", ["mlp_mod=rmsnorm_out", "rmsnorm_out=mlp_mod"])
def test_an_alias_of_no_tensor_is_refused(run: Run, unpacked: Callable[[str], str], alias: str) -> None:
    result = run("mpk", "check", unpacked("micro_2layer"), "--alias", alias)
    assert result.exit_code == 2
    assert "--alias: 'mlp_mod': did you mean mlp_mid" in result.stderr
    assert result.stderr.count("\n") == 1


def test_nothing_is_predicted_of_a_graph_that_is_not_safe(run: Run, unpacked: Callable[[str], str]) -> None:
    result = run("mpk", "predict", unpacked("exp_mla"), "--json")
    assert result.exit_code == 3
    assert "prediction" not in json.loads(result.stdout)


def test_only_predict_writes_a_trace(run: Run, unpacked: Callable[[str], str]) -> None:
    result = run("mpk", "check", unpacked("micro_2layer"), "--trace", "x.json")
    assert result.exit_code == 2
    assert "--trace goes with predict" in result.stderr


def test_repair_writes_files_that_check_accepts(run: Run, unpacked: Callable[[str], str], tmp_path: Path) -> None:
    files = [unpacked("micro_2gpu_r0"), unpacked("micro_2gpu_r1")]
    assert run("mpk", "check", *files).exit_code == 3
    (tmp_path / "mended").mkdir()
    result = run("mpk", "repair", *files, "-o", str(tmp_path / "mended"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["relays"] == 40
    mended = [str(tmp_path / "mended" / Path(path).name) for path in files]
    assert run("mpk", "check", *mended).exit_code == 0


def test_repair_wants_all_ranks_and_a_directory(run: Run, unpacked: Callable[[str], str], tmp_path: Path) -> None:
    path = unpacked("micro_2gpu_r0")
    assert "give one a rank" in run("mpk", "repair", path, "-o", str(tmp_path)).stderr
    assert "give --output, where to write" in run("mpk", "repair", path).stderr
    assert "--output goes with repair and search" in run("mpk", "check", path, "-o", str(tmp_path)).stderr


def test_search_writes_a_proved_graph_that_is_no_slower(
    run: Run, unpacked: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "best").mkdir()
    path = unpacked("micro_2layer")
    result = run("mpk", "search", path, "--workers", "8", "--trials", "12", "-o", str(tmp_path / "best"), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)["search"]
    best = found["best"]["latency_us"]
    assert best == min(row["latency_us"] for row in found["trials"]) <= found["given"]["latency_us"]
    written = str(tmp_path / "best" / Path(path).name)
    predicted = json.loads(run("mpk", "predict", written, "--workers", "8", "--json").stdout)["prediction"]
    assert predicted["latency_us"] == best
    assert "all proved" in run("mpk", "search", path, "--workers", "8", "--trials", "3").stdout


def test_a_racy_graph_is_not_searched(run: Run, unpacked: Callable[[str], str]) -> None:
    result = run("mpk", "search", unpacked("exp_mla"), "--json")
    assert result.exit_code == 3
    assert "search" not in json.loads(result.stdout)


def test_options_of_another_action_are_refused(run: Run, unpacked: Callable[[str], str]) -> None:
    for option in (["--context", "64"], ["--picture", "x.svg"], ["--trials", "3"], ["--seed", "1"]):
        result = run("mpk", "check", unpacked("micro_2layer"), *option)
        assert (result.exit_code, option[0] in result.stderr) == (2, True)


def test_convert_writes_a_program_that_verify_passes(run: Run, unpacked: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
             "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False}
        )
    )  # fmt: skip
    program = str(tmp_path / "program.json")
    convert = ("mpk", "convert", unpacked("micro_2layer"), "--model", str(tmp_path), "--context", "16", "-o", program)
    result = run(*convert)
    assert result.exit_code == 0, result.stderr
    assert "71 tasks and 28 counters, for one sequence, proved" in result.stdout
    verified = run("verify", program, "--model", str(tmp_path))
    assert verified.exit_code == 0 and "PASS" in verified.stdout, verified.stderr
    other = run("mpk", "convert", unpacked("micro_2layer"), "--model", "llama3-8b", "-o", program)
    assert other.exit_code == 2
    assert other.stderr.count("\n") == 1


def test_convert_wants_a_model_and_a_file_to_write(run: Run, unpacked: Callable[[str], str]) -> None:
    path = unpacked("micro_2layer")
    assert "give --output, where to write" in run("mpk", "convert", path, "--model", "llama3-8b").stderr
    assert "give one FILE, and its model as --model" in run("mpk", "convert", path, "-o", "program.json").stderr
