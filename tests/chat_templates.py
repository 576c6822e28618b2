"""Chat templates: of published kinds, of single features, and changed at random; and how flywheel's text of a
conversation differs from transformers'."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Final

from mutations import mutate_bytes

from flywheel.errors import FlywheelError

SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}

CHATS: Final[Sequence[list[dict[str, Any]]]] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be brief\n"}, {"role": "user", "content": " a <b> & 'c' \"d\" é 語 "},
     {"role": "assistant", "content": "one"}, {"role": "user", "content": "two", "name": "ann"}],
    [{"role": "assistant", "content": "", "reasoning": "because"}, {"role": "user", "content": "x", "other": None}],
    [{"role": "tool", "content": "{}"}],
)  # fmt: skip

PUBLISHED: Final = (
    # ChatML
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # ChatML with a system message of its own
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nYou are "
    "a helpful AI assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}",
    # Llama 2
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif "
    "%}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if "
    "loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if "
    "message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] "
    "== 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    # Llama 3
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
    "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    # Llama 3.1, shortened
    "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n{%- if "
    "not tools_in_user_message is defined %}\n    {%- set tools_in_user_message = true %}\n{%- endif %}\n{%- if not "
    "date_string is defined %}\n    {%- if strftime_now is defined %}\n        {%- set date_string = "
    "strftime_now('%Y') %}\n    {%- else %}\n        {%- set date_string = '26 Jul 2024' %}\n    {%- endif %}\n{%- "
    "endif %}\n{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n\n{%- if "
    "messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n    {%- set "
    "messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n\n{{- "
    "'<|start_header_id|>system<|end_header_id|>\n\n' }}\n{%- if tools is not none %}\n    {{- 'Environment: "
    "ipython\n' }}\n{%- endif %}\n{{- 'Today Date: ' + date_string + '\n\n' }}\n{{- system_message }}\n{{- "
    "'<|eot_id|>' }}\n{%- for message in messages %}\n    {%- if not (message.role == 'ipython' or message.role == "
    "'tool' or 'tool_calls' in message) %}\n        {{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}\n    {%- elif 'tool_calls' in message %}\n "
    "       {{- raise_exception('x') }}\n    {%- elif message.role == 'tool' %}\n        {%- if message.content is "
    "mapping or message.content is iterable %}\n            {{- message.content | tojson }}\n        {%- endif %}\n  "
    "  {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- 'assistant\n\n' }}\n{%- endif %}\n",
    # Mistral
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set "
    "loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{%- if not tools is "
    "defined %}{%- set tools = none %}{%- elif tools is not none %}{{- '[AVAILABLE_TOOLS]' + tools | tojson }}{%- "
    "endif %}{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}{%- set ns = "
    "namespace() %}{%- set ns.index = 0 %}{%- for message in loop_messages %}{%- if not (message.role == 'tool' or "
    "(message.tool_calls is defined and message.tool_calls is not none)) %}{%- if (message['role'] == 'user') != "
    "(ns.index % 2 == 0) %}{{- raise_exception('After the optional system message, conversation roles must "
    "alternate') }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for "
    "message in loop_messages %}{%- if message['role'] == 'user' %}{%- if loop.last and system_message is defined "
    "%}{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + "
    "message['content'] + '[/INST]' }}{%- endif %}{%- elif message['role'] == 'assistant' %}{{- ' ' + "
    "message['content']|trim + eos_token }}{%- endif %}{%- endfor %}",
    # Qwen 3, shortened
    "{%- if tools %}\n    {{- '<tools>' }}\n{%- else %}\n    {%- if messages[0].role == 'system' %}\n        {{- "
    "'<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n{%- set ns "
    "= namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n{%- for message in messages[::-1] "
    "%}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n    {%- if ns.multi_step_tool and message.role "
    "== 'user' and message.content is string and not(message.content.startswith('<tool_response>') and "
    "message.content.endswith('</tool_response>')) %}\n        {%- set ns.multi_step_tool = false %}\n        {%- "
    "set ns.last_query_index = index %}\n    {%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n    {%- if "
    "message.content is string %}\n        {%- set content = message.content %}\n    {%- else %}\n        {%- set "
    "content = '' %}\n    {%- endif %}\n    {%- if message.role == 'assistant' %}\n        {%- set reasoning_content "
    "= '' %}\n        {%- if message.reasoning_content is string %}\n            {%- set reasoning_content = "
    "message.reasoning_content %}\n        {%- elif '</think>' in content %}\n            {%- set content = "
    "content.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n        {{- '<|im_start|>' + message.role "
    "+ '\\n<think>' + reasoning_content.strip('\\n') + '</think>' + content.lstrip('\\n') }}\n    {%- else %}\n      "
    "  {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor "
    "%}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is "
    "defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- "
    "endif %}",
    # Gemma
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}{% "
    "set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt "
    "%}{{'<start_of_turn>model\n'}}{% endif %}",
    # Zephyr
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n{% "
    "elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif "
    "%}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    # for training
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% "
    "endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
    # a macro with a caller
    "{%- macro turn(m) -%}<{{ m.role }}|{{ caller() }}>{%- endmacro -%}{% for m in messages %}{% call turn(m) %}{{ "
    "m.content }}{% endcall %}{% endfor %}",
)  # fmt: skip

FEATURES: Final = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ sep_token is defined }}",
    "{{ tools is none }}{{ tools is not none }}{{ tools is defined }}", "{{ documents is none }}{{ documents }}",
    "{{ add_generation_prompt }}{{ continue_final_message is defined }}{{ enable_thinking is defined }}",
    "{{ messages | tojson }}", "{{ messages | tojson(indent=2) }}", "{{ messages | tojson(true) }}",
    "{{ messages[0] | tojson(ensure_ascii=True, sort_keys=true) }}", "{{ 'é<' | tojson(separators=(',', ':')) }}",
    "{{ {'b': 1, 'a': [none, 1.5]} | tojson(false, 1, none, true) }}", "{{ messages | tojson(nothing=1) }}",
    "{{ undefined_thing | tojson }}", "{{ dict(a=1) | tojson }}{{ dict([('a', 2)]) }}",
    "{{ dict.fromkeys(['a'], 1) }}", "{{ dict.keys }}", "{{ namespace(a=1).a }}",
    "{% set ns = namespace() %}{% set ns.x = 3 %}{{ ns.x }}", "{% set ns = namespace(_x=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ namespace(self=1).self }}",
    "{{ namespace({'a': 4}, b=5).b }}", "{{ strftime_now('%Y') }}", "{{ strftime_now }}",
    "{{ raise_exception('no\n  way') }}", "{{ raise_exception(messages) }}", "{{ raise_exception() }}",
    "{{ raise_exception }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% break %}", "{% generation %}a{% endgeneration %}", "{% generation %}",
    "{%- generation -%} a {%- endgeneration -%} b",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "{{ messages[0].__class__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}",
    "{{ messages.__len__() }}", "{{ messages[9].content }}", "{{ messages[0].nothing }}",
    "{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ messages[0]['content'][100] }}",
    "{{ range(3) | list }}", "{{ range(999999) | list }}", "{{ lipsum }}", "{{ cycler('a', 'b').next() }}",
    "{{ joiner(',')() }}", "{{ self }}", "{{ messages | length }}",
    "{{ messages | map(attribute='role') | join(',') }}", "{{ messages[0] | items | list }}",
    "{{ messages[0].items() | list }}", "{{ '%s-%d' | format('a', 3) }}", "{{ '<&>' | e }}", "{{ '<&>' }}",
    "{{ '<&>' | safe }}", "{{ messages[0].content | upper }}", "{{ messages[0].content | replace('h', 'j') }}",
    "{{ messages[0].content.split('i') }}", "{{ '{:>5}'.format('a') }}", "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "{{ messages | first | string }}",
    "{{ messages[-1:] }}", "{{ messages[::-1] | map(attribute='role') | list }}", "{{ namespace }}", "{{ dict }}",
    "{{ messages[0].content is string }}{{ messages is iterable }}{{ messages is mapping }}",
    "{{ none }}{{ None }}{{ true }}{{ True }}", "{% set tools = [] %}{{ tools is none }}",
    "{{ x if x is defined else 'y' }}", "{% if tools %}t{% else %}n{% endif %}",
    "   {% if true %}\n  a\n   {% endif %}\nb\n", "a\n{# note #}\nb\n", "{{ 'a' }}\n\n\n",
    "  {%+ if true %}a{% endif %}", "{% raw %}{{ x }}{% endraw %}", "{% filter upper %}a{% endfilter %}",
    "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}", "{% block a %}b{% endblock %}",
    "{% with a = 1 %}{{ a }}{% endwith %}", "{% autoescape true %}{{ '<' }}{% endautoescape %}", "{% do 1 %}",
    "{% trans %}a{% endtrans %}", "{{ _('a') }}", "{% macro a(b) %}{{ b }}{% endmacro %}{{ a(1) }}",
    "{% set a %}x{% endset %}{{ a }}", "{% nothing %}", "{{ a b }}", "{{", "{% if %}", "{% for %}{% endfor %}",
    "{% endif %}", "", "{{ messages | nothing }}", "{{ messages is nothing }}", "{{ messages | sum }}",
    "{{ messages | sort(attribute='role') | map(attribute='role') | list }}", "{{ messages | groupby('role') }}",
    "{{ messages | batch(2) | list | length }}", "{{ messages | last }}",
    "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}|{{ messages[0].reasoning }}",
    "{{ messages[-1] | tojson }}", "{{ messages[0].content.encode('utf-8') }}",
    "{{ messages[0].content.format_map({}) }}", "{{ '\ud83d' }}", "{{ messages[0]['role'] ~ 1 ~ none }}",
    "{{ 2 ** 10 }}{{ 7 // 2 }}{{ -7 % 3 }}", "{{ 10 ** 400 }}", "{{ 'x' * 3 }}", "{{ [1, 2] + [3] }}",
    "{{ messages | map('upper') | list }}", "{{ messages[0].get('role', 'x') }}",
    "{{ messages[0].update({'a': 1}) }}", "{{ messages[0].pop('role') }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for m in messages recursive %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem.role }}{{ "
    "loop.cycle('a', 'b') }}{% endfor %}",
    "{% for m in [] %}a{% else %}b{% endfor %}", "{{ (messages | list)[0].role }}", "{{ messages[0].content | int }}",
    "{{ 1.0 | round(2) }}",
    "{{ messages[0].content | wordcount }}{{ 'a b' | title }}{{ ' a ' | trim }}{{ 'a' | center(5) }}",
    "{{ 'a' in 'abc' and not false or x }}",
    "{{ messages[0].content | default('x') }}{{ y | default('x') }}{{ '' | default('x', true) }}",
    "{{ 'a,b'.split(',') | list }}", "{{ [1,2,3] | batch(2) | list }}", "{{ messages | pprint }}",
    "{{ '2' | float }}", "{{ 'http://a.b' | urlize }}", "{{ {'a': 1} | xmlattr }}", "{{ {'a': 1} | urlencode }}",
    "{{ [3, 1] | sort }}{{ [3, 1] | max }}{{ [1, 1] | unique | list }}",
)  # fmt: skip


def template(seed: int) -> str:
    """A template of some features, or a published one that is changed in some bytes."""
    random = Random(f"template:{seed}")
    if random.random() < 0.6:
        return "".join(random.sample(FEATURES, random.randint(2, 4)))
    return mutate_bytes(random.choice((*PUBLISHED, *FEATURES)).encode("utf-8", "surrogatepass"), random).decode(
        errors="replace"
    )


_OBJECT: Final = re.compile(r"<(?:[^<>]|<(?:locals|lambda)>)* at 0x[0-9a-f]+>|<class '(?:[^<>']|<locals>)*'>")
"""A function or a class as Python prints it: by its own name, wherever it is."""


class Renderers:
    """flywheel and transformers, for one template after the other."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        tokens = {token: number for number, token in enumerate(SPECIAL.values())}
        self._folder = folder
        self._theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(tokens)), **SPECIAL)

    def differ(self, text: str, variables: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        """How the texts of a conversation differ; None where both are equal, or both refuse."""
        for chat in CHATS:
            mine, other = self.by_flywheel(text, chat, variables), self.by_transformers(text, chat, variables)
            if mine != other and (mine is None or other is None or _OBJECT.sub("", mine) != _OBJECT.sub("", other)):
                return f"{mine!r}, and of transformers {other!r}"
        return None

    def by_flywheel(
        self, text: str, chat: list[dict[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str | None:
        from flywheel.models.templating import render
        from flywheel.models.tokenizer_files import Templates

        templates = Templates(self._folder, {"default": ("chat_template.jinja", text)})
        try:
            return render(templates, chat, SPECIAL, variables)
        except FlywheelError:
            return None

    def by_transformers(
        self, text: str, chat: list[dict[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str | None:
        try:
            made: str = self._theirs.apply_chat_template(
                chat, chat_template=text, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception:  # noqa: BLE001  whatever it refuses a conversation with
            return None
        return made
