from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import UsageError
from flywheel.search.spec import DEFAULT_TRIALS, CampaignSpec, read_options_file, with_name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context=0 is less than 1"),
        ({"trials": 0}, "trials=0 is less than 1"),
        ({"jobs": 0}, "jobs=0 is less than 1"),
        ({"patience": 0}, "patience=0 is less than 1"),
        ({"seed": -1}, "seed=-1 is less than 0"),
        ({"time_s": 0.0}, "time_s=0.0 is not positive and finite"),
        ({"time_s": float("nan")}, "time_s=nan is not positive and finite"),
        ({"time_s": float("inf")}, "time_s=inf is not positive and finite"),
        ({"until": 0.0}, "until=0.0 is not a floor fraction in 0..1"),
        ({"until": 1.5}, "until=1.5 is not a floor fraction in 0..1"),
        ({"until": float("nan")}, "until=nan is not a floor fraction in 0..1"),
        ({"measure": "guess"}, "measure='guess' is not one of auto, predict, cuda"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        CampaignSpec("m", "g", **options)
    assert str(caught.value) == message


def test_the_default_budget_is_finite() -> None:
    assert CampaignSpec("m", "g").trials == DEFAULT_TRIALS


def test_an_options_file_holds_any_option(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(
        'model = "llama3-8b"\ngpu = "h100"\ntime_s = 60\nuntil = 0.9\nseeds = false\nname = "mine"\n'
        '[fix]\ndepth = 4\npages = "none"\n'
    )
    options = read_options_file(path)
    assert options == {
        "model": "llama3-8b",
        "gpu": "h100",
        "time_s": 60,
        "until": 0.9,
        "seeds": False,
        "name": "mine",
        "fix": {"depth": "4", "pages": "none"},
    }
    assert CampaignSpec(**options).fix == {"depth": "4", "pages": "none"}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("model = ", "not TOML"),
        ("\udcff", "not UTF-8"),
        ("modle = 'x'", "'modle' is not one of model, gpu"),
        ("trials = '12'", "trials='12' is not of type int"),
        ("trials = true", "trials=True is not of type int"),
        ("trials = 1.5", "trials=1.5 is not of type int"),
        ("until = '0.9'", "until='0.9' is not of type float"),
        ("seeds = 1", "seeds=1 is not of type bool"),
        ("model = 8", "model=8 is not of type str"),
        ("[fix]\nrows.qkv = 32", "fix: 'rows.qkv' has a dot, so TOML wants its name in quotes"),
        ("fix = 'depth'", "fix='depth' is not a table of knobs"),
        ("[campaign]\nmodel = 'x'", "'campaign' is not one of"),
        ("model = 'a'\nmodel = 'b'", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
    ],
    ids=lambda value: value[:20],
)
def test_options_files_with_faults_are_refused_in_one_line(text: str, fact: str, tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as caught:
        read_options_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert fact in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_options_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml: No such file or directory$"):
        read_options_file(tmp_path / "absent.toml")


def test_campaigns_are_named_after_what_they_search() -> None:
    spec = CampaignSpec("llama3-8b", "h100", sampler="random", seed=7)
    named = with_name(spec, "predict")
    assert (named.name, named.measure) == ("llama3-8b-h100-bf16-c512-predict-random-s7", "predict")
    assert with_name(CampaignSpec("a", "b", name="mine"), "predict").name == "mine"
