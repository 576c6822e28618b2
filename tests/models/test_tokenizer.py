from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import HANG_S
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors

from flywheel.errors import RequestError, TokenizerError, UsageError
from flywheel.models.tokenizer import Tokenizer, has_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of three words that puts `<s>` before every text."""
    fast = Fast(models.WordLevel({"<s>": 0, "hello": 1, "world": 2, "?": 3}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(["<s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_gets_the_special_tokens_that_the_model_expects(folder: Path) -> None:
    with Tokenizer(folder) as tokenizer:
        assert tokenizer.encode("hello world") == [0, 1, 2]


def test_text_comes_back_without_special_and_unknown_tokens(folder: Path) -> None:
    with Tokenizer(folder) as tokenizer:
        assert tokenizer.decode([0, 1, 2, 999]) == "hello world"


def test_tokens_are_spelled_alone_with_their_bytes(folder: Path, tmp_path: Path) -> None:
    with Tokenizer(folder) as tokenizer:
        assert tokenizer.spell([0, 1]) == [(" <s>", tuple(b" <s>")), (" hello", tuple(b" hello"))]
    letters = {"<0xE6>": 0, "\N{LOWER ONE EIGHTH BLOCK}world": 1, "?": 2}
    fast = Fast(models.BPE(vocab=letters, merges=[], unk_token="?", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    (tmp_path / "other").mkdir()
    fast.save(str(tmp_path / "other" / "tokenizer.json"))
    with Tokenizer(tmp_path / "other") as tokenizer:
        assert tokenizer.spell([0, 1]) == [("\N{REPLACEMENT CHARACTER}", (0xE6,)), (" world", tuple(b" world"))]


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "no such"}}'])
def test_a_malformed_tokenizer_is_one_line_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def change(folder: Path, **sections: object) -> Path:
    """The tokenizer of the directory with other sections."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **sections}))
    return folder


def chatting(folder: Path, template: str) -> Path:
    """The directory with a chat template, and a token for every word."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


HELLO = [{"role": "user", "content": "hello"}]


def test_a_template_that_takes_all_memory_ends_its_own_process(folder: Path) -> None:
    with Tokenizer(chatting(folder, "{{ 'x' * 10**11 }}")) as tokenizer:
        with pytest.raises(TokenizerError, match=r"chat_template\.jinja': fails: MemoryError"):
            tokenizer.chat(HELLO)
        assert tokenizer.encode("hello") == [0, 1]


def test_a_template_that_loops_is_ended_and_the_next_call_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tokenizer(chatting(folder, LOOP)) as tokenizer:
        first = tokenizer._process.pid
        monkeypatch.setattr("flywheel.models.tokenizer.LIMIT_S", 0.3)
        with pytest.raises(TokenizerError, match=r"chat_template\.jinja': has no answer after 0\.3 s"):
            tokenizer.chat(HELLO)
        assert not running(first)
        monkeypatch.setattr("flywheel.models.tokenizer.LIMIT_S", 30.0)
        assert tokenizer.encode("hello") == [0, 1]


def test_the_kernel_ends_a_call_that_nobody_ends(folder: Path) -> None:
    """Of a parent that is stopped, for example."""
    words = [sys.executable, "-c", LIMITED, str(os.getpid())]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        requests = [{"open": str(chatting(folder, LOOP))}, {"encode": "hello"}, {"chat": HELLO}]
        answer, _ = process.communicate("".join(json.dumps(each) + "\n" for each in requests), timeout=HANG_S)
    assert [json.loads(line) for line in answer.splitlines()] == [{"done": OPENED}, {"done": [0, 1]}]
    assert process.returncode == -signal.SIGXCPU


OPENED = {"end_id": None, "anew": False, "template": "chat_template.jinja"}
LIMITED = "from flywheel.models import tokenizing; tokenizing.MAX_SECONDS = 1; tokenizing.main()"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
OWNER = """
import sys
from pathlib import Path
from flywheel.models.tokenizer import Tokenizer
tokenizer = Tokenizer(Path(sys.argv[1]))
print(tokenizer._process.pid, flush=True)
tokenizer.chat([{"role": "user", "content": "hello"}])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_tokenizer_in_a_loop_ends_with_its_owner(number: signal.Signals, folder: Path) -> None:
    words = [sys.executable, "-c", OWNER, str(chatting(folder, LOOP))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        while processor_ticks(child) < 20 + START_TICKS:  # it is in the loop
            assert owner.poll() is None
            time.sleep(0.05)
        owner.send_signal(number)
        owner.wait(HANG_S)
        end = time.monotonic() + HANG_S
        while running(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not running(child)


START_TICKS = 30
"""What the process needs to start."""


def processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def running(pid: int) -> bool:
    """Whether a process runs. A dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('System role\\n not  supported') }}", "refuses them: System role not supported$"),
        ("{{ messages[0].nothing.more }}", "cannot render them: .* has no attribute 'nothing'$"),
        ("{{ 1 / 0 }}", "cannot render them: division by zero$"),
    ],
)
def test_a_conversation_that_a_template_refuses_is_the_requests_fault(
    template: str, words: str, folder: Path
) -> None:
    with Tokenizer(chatting(folder, template)) as tokenizer:
        process = tokenizer._process
        with pytest.raises(RequestError, match=f"^messages: the chat template {words}") as caught:
            tokenizer.chat(HELLO)
        assert str(folder) not in str(caught.value)
        assert tokenizer.encode("hello") == [0, 1]
        assert tokenizer._process is process


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages | nothing }}", "{{ ''.__class__.__mro__[1] }}"])
def test_a_template_that_is_none_is_the_files_fault(template: str, folder: Path) -> None:
    with Tokenizer(chatting(folder, template)) as tokenizer:
        with pytest.raises(TokenizerError, match=r"chat_template\.jinja': chat template: ") as caught:
            tokenizer.chat(HELLO)
        assert caught.value.fault.startswith("chat_template.jinja: chat template: ")
        assert tokenizer.encode("hello") == [0, 1]


def test_a_fault_of_a_template_in_a_subfolder_names_the_subfolder(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    file = folder / "additional_chat_templates" / "tool.jinja"
    file.write_text("{{ messages }}")
    fact = "no chat template is called default; there are tool"
    with Tokenizer(folder) as tokenizer, pytest.raises(TokenizerError) as caught:
        tokenizer.chat(HELLO)
    assert str(caught.value) == f"{str(file)!r}: {fact}"
    assert pickle.loads(pickle.dumps(caught.value)).fault == f"additional_chat_templates/tool.jinja: {fact}"


@pytest.mark.parametrize(("found", "holds"), [("3.1.5", False), ("3.1.6", True), ("3.2", True), ("4.0.0rc1", True)])
def test_a_sandbox_that_does_not_hold_renders_no_template(
    found: str, holds: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.models.tokenizer.version", lambda name: found)
    with Tokenizer(chatting(folder, "{{ messages[0].content }}")) as tokenizer:
        if holds:
            assert tokenizer.chat(HELLO) == [1]
        else:
            with pytest.raises(UsageError, match=r"^a chat needs jinja2 3\.1\.6 or newer: pip install "):
                tokenizer.chat(HELLO)


def test_half_a_character_is_the_requests_fault(folder: Path) -> None:
    with Tokenizer(chatting(folder, "{{ messages[0].content }}")) as tokenizer:
        process = tokenizer._process
        with pytest.raises(RequestError, match=r"^prompt: .*U\+D83D"):
            tokenizer.encode("a\ud83d")
        with pytest.raises(RequestError, match=r"^messages: .*U\+D83D"):
            tokenizer.chat([{"role": "user", "content": "\ud83d"}])
        assert tokenizer._process is process


def test_a_pattern_that_makes_the_library_panic_is_one_line(folder: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    changed = change(folder, pre_tokenizer=split)
    with Tokenizer(changed) as tokenizer, pytest.raises(UsageError, match="retry-limit"):
        tokenizer.encode("a" * 60 + "d")


def test_a_library_that_does_not_answer_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tokenizer(folder) as tokenizer:
        monkeypatch.setattr("flywheel.models.tokenizer.LIMIT_S", 0.1)
        tokenizer._process.send_signal(signal.SIGSTOP)
        with pytest.raises(UsageError, match=r"no answer after 0\.1 s"):
            tokenizer.encode("hello")


def test_a_tokenizer_that_is_refused_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = []
    for _ in range(3):
        with pytest.raises(TokenizerError) as refused:
            Tokenizer(tmp_path)
        kept.append(refused.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_tokenizer_works_where_a_thousand_descriptors_are_open(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Tokenizer(folder) as tokenizer:
            assert tokenizer.encode("hello world") == [0, 1, 2]
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
