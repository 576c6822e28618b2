from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.conftest import checkpoint as small_checkpoint

checkpoint = small_checkpoint

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SMALLER = (
    (r'model="llama3[^"]*"', 'model="smollm2-135m"'), (r"trials=\d+", 'trials=3, measure="predict"'),
    (r'Decoder\.load\("./Llama-3.2-1B"', 'Decoder.load("Llama-3.2-1B", device="reference"'),
    (r"max_tokens=\d+", "max_tokens=2"),
)  # fmt: skip
"""Changes to an example that keep what it shows, and end it in seconds on a CPU."""


class Client:
    """OpenAI's client, as far as the example goes, with one answer."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.chat = SimpleNamespace(completions=self)

    def create(self, model: str, messages: list[dict[str, str]]) -> Any:
        assert all(each.keys() == {"role", "content"} for each in messages)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="a text"))])


@pytest.mark.parametrize(
    ("page", "shows"), [("README.md", (r"(None|<Known .*>) <Gains: .*>\n", "a text$")),
                        ("docs/reference.md", (r"^\d+\.\d+ 0\.\d+ <ScheduleConfig", r"nan \d+\.\d+$"))],
)  # fmt: skip
def test_the_python_of_a_page_runs_on_a_predicted_search(
    page: str, shows: tuple[str, ...], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=Client))  # type: ignore[arg-type]
    (tmp_path / "Llama-3.2-1B").symlink_to(checkpoint)
    blocks = CODE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        for found, less in SMALLER:
            block = re.sub(found, less, block)
        exec(compile(block, page, "exec"), names)
    said = capsys.readouterr().out
    for each in shows:
        assert re.search(each, said.strip(), re.DOTALL), said
