"""Chat templates of common model families, reduced to the features that affect rendering."""

import json
from pathlib import Path

from tokenizers import Tokenizer

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Tools in the system message; results grouped in a user turn; keeps thinking since the last
# question only; splits content that contains thinking; a switch that pre-fills empty thinking.
QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nSignatures are within <tools></tools>:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\nCall them within <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.open and message.role == 'user' and message.content is string
    and not (message.content.startswith('<tool_response>')
             and message.content.endswith('</tool_response>')) %}
{%- set ns.open = false %}{%- set ns.last = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thinking = message.reasoning_content or '' %}
{%- if not thinking and '</think>' in content %}
{%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thinking) %}
{{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

# The date at the beginning; trims content; tools in the first user message; one call per message.
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' }}
{{- strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
{%- if messages | length == 0 %}{{- raise_exception('no first user message') }}{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven these, answer with JSON.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- messages[0]['content'] | trim + '<|eot_id|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('single calls only') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Roles must alternate; ids have nine characters; system and tools before the last question, so the
# renderer adds its own tool prompt instead.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
{%- if not (m.role == 'tool' or m.tool_calls is defined) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate user and assistant') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}
{%- if tools is not none and loop.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if loop.last and system is defined %}
{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' }}
{%- endfor %}
{{- eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

# The same with tools and system at the beginning: only the ids are unusual.
MISTRAL_HEAD = MISTRAL.replace("loop.last and system", "loop.first and system").replace(
    "tools is not none and loop.last", "tools is not none and loop.first"
)

# No system role, no tools; roles must alternate; trims content.
GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('no system role') }}{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# Content is a list of parts; writes no end token after a reply.
PARTS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}{{- part.text }}{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen": (QWEN, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "mistral_head": (MISTRAL_HEAD, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "parts": (PARTS, "<|im_end|>"),
}

_SPECIAL = [
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]

_DOUBLING = "{% set ns = namespace(x=messages[0].content) %}{% for i in range(60) %}"
# Templates that would exhaust time or memory; each reads the first message.
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "empty loops": "{% for a in range(99999) if a in range(99999) | list %}{% endfor %}",
    "string doubling": _DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by concatenation": _DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a constant": "{{ 'x' * 10 ** 10 }}",
    "a number": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ '%9999999999d' % 1 }}",
    "nested lists": _DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == ns.x | list }}"
    "{{ ns.x }}",
    "placeholder text": "{{ lipsum(n=10 ** 7) }}",
    "text": "{% for a in range(9999) %}{{ messages[0].content * 9999 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
}


def write_model(directory: Path, tokenizer_json: Path, name: str) -> Path:
    """Write the tokenizer files of a model with the named template and its special tokens."""
    template, eos = TEMPLATES[name]
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
