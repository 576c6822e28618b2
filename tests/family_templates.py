"""Chat templates in the structure of those that families publish, shortened, and variables that their requests set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

TEMPLATES: Final[Mapping[str, str]] = {
    "gemma": (
        "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- if messages[0]['content'] is string -%}\n"
        "        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n    {%- else -%}\n"
        "        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}\n    {%- endif -%}\n"
        "    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n    {%- set first_user_prefix = '' -%}\n"
        "    {%- set loop_messages = messages -%}\n{%- endif -%}\n{%- for message in loop_messages -%}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
        "        {{ raise_exception('Roles must alternate user/assistant') }}\n    {%- endif -%}\n"
        "    {%- if (message['role'] == 'assistant') -%}\n        {%- set role = 'model' -%}\n    {%- else -%}\n"
        "        {%- set role = message['role'] -%}\n    {%- endif -%}\n"
        "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}\n"
        "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n"
        "    {%- elif message['content'] is iterable -%}\n        {%- for item in message['content'] -%}\n"
        "            {%- if item['type'] == 'image' -%}\n                {{ '<start_of_image>' }}\n"
        "            {%- elif item['type'] == 'text' -%}\n                {{ item['text'] | trim }}\n"
        "            {%- endif -%}\n        {%- endfor -%}\n    {%- else -%}\n"
        "        {{ raise_exception('Invalid content type') }}\n    {%- endif -%}\n    {{ '<end_of_turn>\n' }}\n"
        "{%- endfor -%}\n{%- if add_generation_prompt -%}\n    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n"
    ),
    "phi-3": (
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\n' + "
        "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + "
        "'<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token "
        "}}{% endif %}"
    ),
    "phi-4": (
        "{% for message in messages %}{% if message['role'] in ['system', 'developer'] and 'tools' in message and "
        "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + "
        "message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + "
        "message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant<|im_sep|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "granite": (
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content'] %}\n"
        "    {%- set loop_messages = messages[1:] %}\n{%- else %}\n"
        "    {%- set system_message = \"Knowledge: April 2024.\\nToday: \" + strftime_now('%Y') + '.' %}\n"
        "    {%- if tools and documents %}\n        {%- set system_message = system_message + ' Both.' %}\n"
        "    {%- elif documents %}\n        {%- set system_message = system_message + ' Use the documents.' %}\n"
        "    {%- elif thinking %}\n        {%- set system_message = system_message + ' Think first.' %}\n"
        "    {%- endif %}\n    {%- set loop_messages = messages %}\n{%- endif %}\n"
        "{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}\n{%- if tools %}\n"
        "    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}\n"
        "{%- endif %}\n{%- if documents %}\n    {{- '<|start_of_role|>documents<|end_of_role|>' }}\n"
        "    {%- for document in documents %}\n        {{- 'Document ' + loop.index0 | string + '\n' + "
        "document['text'] }}\n        {%- if not loop.last %}\n            {{- '\n\n'}}\n        {%- else %}\n"
        "            {{- '<|end_of_text|>\n' }}\n        {%- endif %}\n    {%- endfor %}\n{%- endif %}\n"
        "{%- for message in loop_messages %}\n    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + "
        "message['content'] + '<|end_of_text|>\n' }}\n    {%- if loop.last and add_generation_prompt %}\n"
        "        {{- '<|start_of_role|>assistant' }}\n        {%- if controls %}\n            {{- ' ' + controls | "
        "tojson() }}\n        {%- endif %}\n        {{- '<|end_of_role|>' }}\n    {%- endif %}\n{%- endfor %}"
    ),
    "smollm3": (
        "{%- if enable_thinking is not defined -%}\n{%- set enable_thinking = true -%}\n{%- endif -%}\n"
        "{%- if enable_thinking -%}\n  {%- set reasoning_mode = '/think' -%}\n{%- else -%}\n"
        "  {%- set reasoning_mode = '/no_think' -%}\n{%- endif -%}\n{{- '<|im_start|>system\n' -}}\n"
        "{%- if messages[0].role == 'system' -%}\n  {%- set system_message = messages[0].content -%}\n"
        "  {%- if '/no_think' in system_message -%}\n    {%- set reasoning_mode = '/no_think' -%}\n  {%- endif -%}\n"
        "  {%- set custom_instructions = system_message.replace('/no_think', '').rstrip() -%}\n{%- endif -%}\n"
        "{{- '## Metadata\n\nToday Date: ' -}}\n{%- set today = strftime_now('%B %Y') -%}\n{{ today ~ '\n' }}\n"
        "{{- 'Reasoning Mode: ' + reasoning_mode + '\n\n' -}}\n{%- if custom_instructions -%}\n"
        "  {{- custom_instructions + '\n\n' -}}\n{%- endif -%}\n{%- if xml_tools or python_tools or tools -%}\n"
        "  {{- '### Tools\n\n' -}}\n  {%- set ns = namespace(xml_tool_string='<tools>\n') -%}\n"
        "  {%- for tool in xml_tools[:] -%}\n    {%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "
        "'\n' -%}\n  {%- endfor -%}\n  {{- ns.xml_tool_string + '</tools>' -}}\n{%- endif -%}\n{{- '<|im_end|>\n' -}}\n"
        "{%- for message in messages -%}\n  {%- set content = message.content if message.content is string else "
        "'' -%}\n"
        "  {%- if message.role == 'user' -%}\n    {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}\n"
        "  {%- elif message.role == 'assistant' -%}\n    {%- generation -%}\n    {%- if reasoning_mode == "
        "'/think' -%}\n"
        "      {{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}\n    {%- else -%}\n"
        "      {{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}\n"
        "    {%- endif -%}\n    {%- endgeneration -%}\n  {%- elif message.role == 'tool' -%}\n"
        "    {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}\n  {%- endif -%}\n{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}\n  {%- if reasoning_mode == '/think' -%}\n"
        "    {{ '<|im_start|>assistant\n' }}\n  {%- else -%}\n"
        "    {{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}\n  {%- endif -%}\n{%- endif -%}"
    ),
    "olmo": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
        "message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
        "{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + "
        "eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "glm": (
        "[gMASK]<sop>\n{%- if tools -%}\n<|system|>\n# Tools\n{% for tool in tools %}\n{{ tool | tojson("
        "ensure_ascii=False) }}\n{% endfor %}\n{%- endif -%}\n{%- macro visible_text(content) -%}\n"
        "    {%- if content is string -%}\n        {{- content }}\n"
        "    {%- elif content is iterable and content is not mapping -%}\n        {%- for item in content -%}\n"
        "            {%- if item is mapping and item.type == 'text' -%}\n                {{- item.text }}\n"
        "            {%- elif item is string -%}\n                {{- item }}\n            {%- endif -%}\n"
        "        {%- endfor -%}\n    {%- else -%}\n        {{- content }}\n    {%- endif -%}\n{%- endmacro -%}\n"
        "{%- for m in messages %}\n{%- if m.role == 'user' -%}<|user|>\n{{ visible_text(m.content) }}\n"
        "{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}\n"
        "{%- elif m.role == 'assistant' -%}\n<|assistant|>\n{%- set content = visible_text(m.content) %}\n"
        "{%- if content.strip() -%}\n{{ '\n' + content.strip() }}\n{%- endif -%}\n{%- elif m.role == 'system' -%}\n"
        "<|system|>\n{{ visible_text(m.content) }}\n{%- endif -%}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n"
        "    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}\n"
        "{%- endif -%}"
    ),
    "cohere2": (
        "{%- macro document_turn(documents) -%}\n<|START_ACTION|>[\n    {\"tool_name\": \"direct\"}\n]<|END_ACTION|>"
        "{% for doc in documents %}\n        \"{{ loop.index0 }}\": {{ doc | tojson }}{% if not loop.last %},\n"
        "        {% endif %}{% endfor %}\n{%- endmacro %}\n{%- set ns = namespace(index=0, seen=false) -%}\n"
        "{%- set sys_ns = namespace(text='') -%}\n{%- if messages and messages[0]['role']|lower == 'system' %}"
        "{%- set sys_ns.text = messages[0]['content'] %}{% endif -%}\n{{ bos_token }}<|START_OF_TURN_TOKEN|>"
        "<|SYSTEM_TOKEN|># Preamble\n{%- if tools or documents %}\n{% if safety_mode|upper == 'STRICT' %}\nStrict.\n"
        "{% elif safety_mode|upper == 'NONE' %}{% endif %}\nYou have been trained to have advanced reasoning.\n"
        "{%- endif %}{% if sys_ns.text %}{{ sys_ns.text }}{% endif %}<|END_OF_TURN_TOKEN|>\n"
        "{%- for message in messages %}\n    {%- if message.role|lower == 'system' and not loop.first %}"
        "{{ raise_exception('System only first') }}\n    {%- elif message.role|lower == 'user' -%}\n"
        "        <|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>\n"
        "        {%- if documents and not ns.seen %}{% set ns.seen = true %}{{ document_turn(documents) }}{% endif %}\n"
        "    {%- elif message.role|lower == 'assistant' or message.role|lower == 'chatbot' -%}\n"
        "        <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>\n    {%- endif %}\n"
        "{%- endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "mistral": (
        "{%- set today = strftime_now('%Y') %}\n{%- set default = 'You are it. Today is ' + today + '.' %}\n"
        "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n    {%- if messages[0]['content'] is string %}\n"
        "        {%- set system_message = messages[0]['content'] %}\n    {%- else %}\n"
        "        {%- set system_message = messages[0]['content'][0]['text'] %}\n    {%- endif %}\n"
        "    {%- set loop_messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = default %}\n"
        "    {%- set loop_messages = messages %}\n{%- endif %}\n"
        "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}\n{%- if tools is not none and tools %}"
        "{{- '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}\n"
        "{%- for message in loop_messages %}\n    {%- if message['role'] == 'user' %}\n"
        "        {%- if message['content'] is string %}\n            {{- '[INST]' + message['content'] + '[/INST]' }}\n"
        "        {%- else %}\n            {{- '[INST]' }}\n            {%- for block in message['content'] %}\n"
        "                {%- if block['type'] == 'text' %}\n                    {{- block['text'] }}\n"
        "                {%- elif block['type'] in ['image', 'image_url'] %}\n                    {{- '[IMG]' }}\n"
        "                {%- else %}\n                    {{- raise_exception('Only text and images') }}\n"
        "                {%- endif %}\n            {%- endfor %}\n            {{- '[/INST]' }}\n        {%- endif %}\n"
        "    {%- elif message['role'] == 'assistant' %}\n        {{- message['content'] + eos_token }}\n    {%- "
        "else %}\n"
        "        {{- raise_exception('Only user and assistant roles') }}\n    {%- endif %}\n{%- endfor %}"
    ),
    "qwen3": (
        "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content + "
        "'<|im_end|>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n    {%- if message.role == 'user' or "
        "(message.role == 'system' and not loop.first) %}\n        {{- '<|im_start|>' + message.role + '\\n' + "
        "message.content + '<|im_end|>' + '\\n' }}\n    {%- elif message.role == 'assistant' %}\n"
        "        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
        "        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
    ),
}

VARIABLES: Final[Sequence[Mapping[str, Any]]] = (
    {}, {"enable_thinking": False}, {"enable_thinking": True}, {"thinking": True}, {"enable_thinking": None},
    {"documents": [{"title": "a", "text": "b \u8a9e <x>"}, {"text": "c"}]}, {"documents": []},
    {"controls": {"length": "short"}, "thinking": False}, {"xml_tools": [{"name": "f"}, "g"]},
    {"custom_instructions": "be brief"}, {"documents": [{"text": "x"}], "safety_mode": "strict"},
    {"bos_token": "<other>"},
)  # fmt: skip
"""What requests set beside the messages."""
