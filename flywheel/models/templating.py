"""Chat templates as transformers renders them: their variables, tags and functions.

A template is a stranger's program, so this runs in the tokenizer's process. Source: huggingface/transformers,
`utils/chat_template_utils.py` and `tokenization_utils_base.py` (`apply_chat_template`), release 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from flywheel.errors import RequestError, TokenizerError
from flywheel.models.tokenizer_files import SETTINGS, Templates

_MOST_WORDS: Final = 400
"""Characters of a template's own words that a message repeats."""
_RENDERING: Final = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template's expressions raise."""
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_ARGUMENTS: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that a special token cannot be called."""
_SETTABLE: Final = frozenset({"documents"})
"""Those of them that a request may set."""


def render(
    templates: Templates, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:  # fmt: skip
    """The conversation up to the beginning of the next answer, as the template `default` writes it; None without any
    template. `special` are the special tokens by their names. `variables` are further ones of the template, such as
    `enable_thinking`; they go before the special tokens.

    A message's `content` may be a list of parts of text. A template that goes through parts gets the list; another one,
    or one that fails at the list, gets the parts joined.

    Raises TokenizerError for a template that is at fault, and RequestError for a conversation that it refuses, for a
    variable that it does not read, and for a part that is no text.
    """
    if not templates.named:
        return None
    file, text = templates.default()
    wrong = next((name for name in special if name in _ARGUMENTS), None)
    if wrong is not None:
        raise TokenizerError(templates.folder / SETTINGS, f"special token {wrong!r}: is a variable of chat templates")
    if not messages:
        raise RequestError("messages: none; a conversation has at least one")
    try:
        template, read, loops = _compiled(text)
    except (*_RENDERING, SyntaxError) as error:
        raise TokenizerError(file, f"chat template: {_words(error)}") from None
    unread = next((name for name in variables if name not in read or name in _ARGUMENTS - _SETTABLE), None)
    if unread is not None:
        raise RequestError(f"messages: the chat template has no variable {unread[:60]!r} that a request may set")
    others = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    given = [_message(each) for each in messages]
    joined = [_joined(place, each) for place, each in enumerate(given)]
    if loops and joined != given:
        with suppress(*_RENDERING):
            return template.render({**special, "messages": given, **others})
    try:
        return template.render({**special, "messages": joined, **others})
    except _RefusalError as error:
        raise RequestError(f"messages: the chat template refuses them: {_words(error)}") from None
    except SecurityError as error:
        raise TokenizerError(file, f"chat template: {_words(error)}") from None
    except _RENDERING as error:
        raise RequestError(f"messages: the chat template cannot render them: {_words(error)}") from None


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message without absent parts, and with its reasoning under the names that templates read."""
    parts = {name: part for name, part in given.items() if part is not None}
    reasoning = next((parts[name] for name in _REASONING if name in parts), None)
    return parts if reasoning is None else {"thinking": reasoning, **parts, "reasoning_content": reasoning}


def _joined(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message at `place` with its content as one text. Raises RequestError for a part that is no text."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages.{place}.content: part {number} is no text")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _goes_through_parts(parsed: nodes.Template) -> bool:
    """Whether a template has a loop over `content`, a variable or a field of a message."""
    for each in [loop.iter for loop in parsed.find_all(nodes.For)]:
        named = isinstance(each, nodes.Name) and each.name == "content"
        field = isinstance(each, nodes.Getattr) and each.attr == "content"
        item = isinstance(each, nodes.Getitem) and isinstance(each.arg, nodes.Const) and each.arg.value == "content"
        if named or field or item:
            return True
    return False


class _RefusalError(TemplateError):
    """A template called `raise_exception`."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks an assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """The block, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_written"), [], [], body)
        block.set_lineno(line)
        return block

    def _written(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` in a template: makes dictionaries, and has no other methods of the type."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """`namespace` in a template, without names that begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:  # so that `self` may be a name
        self, *rest = arguments
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _refuse(message: object) -> None:
    raise _RefusalError(str(message))


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@cache
def _compiled(text: str) -> tuple[Template, frozenset[str], bool]:
    """(a template, the names that it reads, whether it goes through parts of contents)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form), "dict": _Dict(),
        "namespace": _Namespace,
    }  # fmt: skip
    parsed = environment.parse(text)
    read = frozenset(name.name for name in parsed.find_all(nodes.Name) if name.ctx == "load")
    return environment.from_string(text), read, _goes_through_parts(parsed)


def _words(error: Exception) -> str:
    """An error's own words, as one line that any channel can carry."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said[:_MOST_WORDS].encode("utf-8", "replace").decode()
