from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
NEEDY = "def test_needs_a_server(postgres_server): pass\n"


def test_without_a_server_the_tests_that_need_one_fail_and_say_what_to_install(tmp_path: Path) -> None:
    for name in ("conftest.py", "effort.py"):
        shutil.copy(TESTS / name, tmp_path)
    helper = (TESTS / "postgres_server.py").read_text(encoding="utf-8")
    (tmp_path / "postgres_server.py").write_text(helper.replace("/usr/lib/postgresql", str(tmp_path)), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n", encoding="utf-8")
    (tmp_path / "test_needy.py").write_text(NEEDY, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "1 error" in done.stdout
    assert "the tests need PostgreSQL's server" in done.stdout
    assert "apt install postgresql" in done.stdout
