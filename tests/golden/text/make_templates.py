"""Writes templates.json: chat templates, conversations, and the prompts that transformers makes of them.

The templates are our own, in the constructs that published ones use. Run from the repository's root with the
environment of tests/golden/requirements.txt; the clock stands still at CLOCK.
"""

import datetime as dt
import json
import pathlib

import transformers.utils.chat_template_utils as utils
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
CLOCK = dt.datetime(2026, 3, 5, 9, 7, 2)

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Functions\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\\n</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<result>\\n' + content + '\\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Parameters written as tags, content given in parts, macros with several ways out.
PARTS = """\
{%- macro show(content, counting=false, system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'image' in part or part.type == 'image' %}
                {%- if system %}{{- raise_exception('No images in the system message.') }}{%- endif %}
                {%- if counting %}{%- set pictures.n = pictures.n + 1 %}{%- endif %}
                {%- if number_pictures %}Picture {{ pictures.n }}: {% endif -%}
                <|image|>
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('Unexpected part ' ~ part.type) }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Unexpected content') }}
    {%- endif %}
{%- endmacro %}
{%- set pictures = namespace(n=0) %}
{%- if not messages %}{{- raise_exception('No messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = show(message.content, true, message.role == 'system')|trim %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<function=' + call.name + '>\\n' }}
            {%- if call.arguments is defined %}
                {%- for name, value in call.arguments|items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                    {{- value }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Dates, tools in the first user message, defaults for what the caller leaves out.
HEADERS = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: python\\n" }}
{%- endif %}
{{- "Today: " + date_string + " (" ~ strftime_now('%A, %-d %B, %H:%M:%S, day %j, %y/%m, %p %I %%') ~ ")\\n\\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- if tools_in_user_message | default(true) and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("No first user message to put tools in!") }}
{%- endif %}
    {{- '<|header|>user<|end|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One tool-call at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|end|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|header|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

# Roles that must alternate, and whitespace that counts.
ALTERNATE = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{#- A user's turn, then the assistant's; tool results do not count. -#}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id[-9:] + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

# JSON schemas written out as types, by macros that call themselves and each other.
TYPES = """\
{%- macro type_of(schema, depth=0) -%}
    {%- if schema.type == "object" -%}
        {
        {%- for name, one in schema.properties.items() %}
{{ "  " * (depth + 1) }}{{ name }}{{ "?" if name not in (schema.required or []) }}: {{ type_of(one, depth + 1) }},{% if one.description %} // {{ one.description }}{% endif %}
        {%- endfor %}
{{ "  " * depth }}}
    {%- elif schema.type == "array" -%}
        Array<{{ type_of(schema["items"], depth) }}>
    {%- elif schema.enum is defined -%}
        {{ schema.enum | map("tojson") | join(" | ") }}
    {%- elif schema.type is iterable and schema.type is not string -%}
        {{ schema.type | join(" | ") }}
    {%- else -%}
        {{ {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}.get(schema.type, "any") }}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}
type {{ tool.function.name | title }} = (_: {{ type_of(tool.function.parameters) }}) => any;
{% endfor -%}
{%- for m in messages -%}
    {%- if m.role == "system" %}{% continue %}{% endif -%}
    {{ loop.index }}/{{ loop.length }}{{ "!" if loop.last }} {{ loop.cycle("a", "b") }} {{ m.role | upper }}: {{ m.content | default("nothing", true) }}
    {%- if loop.previtem is defined %} (after {{ loop.previtem.role }}){% endif %}
    {%- if loop.nextitem is defined and loop.nextitem.role == m.role %} {% break %}{% endif %}
{% endfor %}"""

WHITESPACE = """
  {% if true %}
    indented
  {% endif %}
{# a comment
   of two lines #}
  {{ messages[0].content }}  \t
{%+ if true %} kept {%+ endif %}
{% for m in messages -%}
    {{ m.role }}
{%- if not loop.last %}, {% endif -%}
{% endfor %}

{% raw %}{{ not a variable }} {% if %}{% endraw %}
x{%- set y = 1 -%}   z
{% set block %}
  a {{ y }}
{% endset %}
[{{ block }}]
end
"""

GENERATION = """\
{%- for message in messages %}
{%- if message.role == 'assistant' -%}
A: {% generation %}{% set inner = message.content %}{{ inner }}
{% endgeneration %}
{%- else %}
{{ message.role | capitalize }}: {{ message.content }}
{% endif %}
{%- endfor %}{{ inner is defined }}"""

# Line ends of other systems: Jinja2 reads them as line feeds, in strings too.
LINE_ENDS = (
    "{%- for message in messages %}\r\n<|im_start|>{{ message.role }}\r\n{{ message.content }}  \r\n\r\n"
    "  {% if loop.last %}\r\nlast\r  {% endif %}\r{{ 'a\r\nb' }}{% endfor %}\r\n{{ '\\r\\n' }}\r\n"
)

SUITE = """\
{{ messages[1:] | map(attribute='role') | list }}
{{ messages | map(attribute='content') | join(' / ') }}
{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | unique | join(',') }}
{{ messages[-1].content[::-1] }} {{ messages[-1]['content'][1:4] }} {{ messages[0].content[-3:] }}
{{ (messages | first).role }} {{ (messages | last).role }} {{ messages[1:][0].role }} {{ messages[:-1] | length }} {{ messages[::-1][0].role }}
{{ 'a,b,,c'.split(',') }} {{ 'a b  c'.split() }} {{ 'a,b,c'.split(',', 1)[1] }} {{ 'a.b.c'.rsplit('.', 1) }} {{ 'k=v=w'.partition('=')[2] }}
{{ '  x '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ ' x '.lstrip() }}|{{ 'x\\n\\n'.rstrip('\\n') }}|{{ 'prefix-a'.removeprefix('prefix-') }}
{{ 'some words'.title() }} {{ 'some words' | capitalize }} {{ 'ABC'.lower() }} {{ 'abc' | upper }} {{ 'a-b'.replace('-', '+') }} {{ 'aaa' | replace('a', 'b', 2) }}
{{ 'abcabc'.find('c') }} {{ 'abc'.count('b') }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ '12'.isdigit() }} {{ ', '.join(['a', 'b']) }}
{{ 7 // 2 }} {{ 7 / 2 }} {{ 8 / 2 }} {{ 7 % 3 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1.0 }} {{ 1e20 }} {{ 0.1 + 0.2 }} {{ '3' | int + 1 }} {{ 3.7 | int }} {{ 2.5 | round }}
{{ true }} {{ none }} {{ False }} {{ [1, 'a', none, true, 1.5] }} {{ {'a': 1, 'b': [2]} }} {{ ('x', 2) }}
{{ none is none }} {{ missing is defined }} {{ missing | default('d') }} {{ '' or 'e' }} {{ [] is iterable }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is number }} {{ true is boolean }} {{ 1 is integer }} {{ 1.0 is float }} {{ true is integer }} {{ 'a' is mapping }}
{{ 'a' in 'abc' }} {{ 'role' in messages[0] }} {{ 3 not in [1, 2] }} {{ 1 < 2 <= 2 }} {{ 'a' ~ 1 ~ none ~ true ~ 1.5 }}
{{ range(5) | list }} {{ range(1, 9, 3) | join('-') }} {{ [3, 1, 2] | sort }} {{ [3, 1, 2] | sort(reverse=true) | first }} {{ [1, 2, 3] | sum }} {{ {'b': 1, 'a': 2} | dictsort }} {{ 'abc' | list }} {{ 'abc' | length }} {{ [1,2,3] | reverse | list }}
{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }};{% endfor %} {{ {'b': 1}.get('b') }} {{ {'b': 1}.get('c', 'none') }} {{ {'b': 1}.keys() | list }} {{ {'b': 1}.values() | list }} {{ dict(a=1, b='x') }}
{% set d = {'items': 'own', 'get': 1} %}{{ d['items'] }} {% for k, v in d.items() %}{{ k }},{% endfor %}
{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% set b = i %}{% endfor %}{{ ns.a }} {{ b is defined }}
{% macro greet(name, mark='!') %}Hello {{ name }}{{ mark }}{{ caller() if caller }}{% endmacro %}{{ greet('A') }} {{ greet('B', mark='?') }} {% call greet('C') %} inside{% endcall %}
{% filter upper %}filtered{% endfilter %} {{ 'a\\nb' | indent(2) }} {{ 'x' if false }} {{ 'x' if false else 'y' }} {{ messages | selectattr('role', 'in', ['user', 'tool']) | list | length }}
{{ '%s has %d' | format('it', 3) }} {{ 'a' * 3 }} {{ [1] + [2] }} {{ 'it\\'s' }} {{ "quo\\"te" | tojson }} {{ ['it\\'s', 'x"y', 'é\\n'] }}
{% for a in [1, 2] %}{% for b in ['x'] %}{{ loop.index }}{{ b }}{% else %}none{% endfor %}{% else %}none{% endfor %}{% for a in [] %}{% else %}empty{% endfor %}
{% for m in messages if m.role != 'user' %}{{ loop.index }}:{{ m.role }} {% endfor %}{% with x = 3 %}{{ x }}{% endwith %} {{ (1, 2) | last }} {{ [[1, 2], [3]] | sum(start=[]) | length }}
{% for group in messages | groupby('role') %}{{ group.grouper }}={{ group.list | length }} {% endfor %}{{ [{'n': 2}, {'n': 1}] | sort(attribute='n') | map(attribute='n') | list }}"""

JSON = """\
{{ value | tojson }}
{{ value | tojson(indent=2) }}
{{ value | tojson(ensure_ascii=True) }}
{{ value | tojson(separators=(',', ':'), sort_keys=true) }}
{{ value | tojson(indent=4, sort_keys=True) }}
{{ [] | tojson }} {{ {} | tojson(indent=1) }} {{ 'a' | tojson }} {{ none | tojson }} {{ true | tojson }} {{ {1: 2, none: 3} | tojson }} {{ messages | map(attribute='role') | list | tojson }}
{{ value }}"""

VALUE = {
    "z": 1, "a": [1, -2, 3.0, 0.1, 1e-7, 1e22, 123456789012345680.0, 1.5e300, -0.0, 12345678901234567890],
    "text": "quotes \" \\ / tab\t newline\n null\u0000 del\u007f é 日本 😀 <b>&amp;'</b> \u2028",
    "nested": {"empty": {}, "list": [], "deep": [[{"x": None}], True, False]},
    "": "empty key", "ключ": "значение",
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather \"now\" in a city – in °C",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city's name"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
                "exact": {"type": ["boolean", "null"], "default": 0.5},
            },
            "required": ["city"],
        },
    },
}
CLOCK_TOOL = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}}

USER = {"role": "user", "content": "Hello there"}
CHATS = {
    "one": [USER],
    "system": [{"role": "system", "content": "  Be brief.\n"}, USER],
    "turns": [USER, {"role": "assistant", "content": "\nHi!  "}, {"role": "user", "content": "日本語 and “quotes” \t"}],
    "thinking": [
        USER,
        {"role": "assistant", "content": "<think>\nhmm\n\n</think>\n\nFine."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "reasoning_content": "again\n", "content": "Good."},
        {"role": "user", "content": "<result>x</result>"},
        {"role": "assistant", "reasoning": "last", "content": "Done."},
    ],
    "tools": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_123456789", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [{"n": 1}], "exact": True, "x": 1.0, "y": None}}},
        ]},
        {"role": "tool", "tool_call_id": "call_123456789", "name": "get_weather", "content": "{\"t\": 3.5}"},
        {"role": "assistant", "content": "3.5 °C."},
        {"role": "user", "content": "And the time?"},
    ],
    "calls": [
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": "Sure.", "tool_calls": [
            {"function": {"name": "now", "arguments": "{}"}, "id": "a"},
            {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}, "id": "b"},
        ]},
        {"role": "tool", "content": "12:00"},
        {"role": "tool", "content": "cold"},
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "See."}]},
        {"role": "user", "content": [{"type": "text", "text": " What is "}, {"type": "image"}, {"type": "text", "text": "?"}, {"type": "image", "image": "x"}]},
    ],
    "wrong": [USER, USER],
    "odd": [USER, {"role": "user", "content": [{"type": "video"}]}],
}


def main():
    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return CLOCK

    utils.datetime = Clock
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file="models/demo/tokenizer.json", bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    demo = json.load(open("models/demo/tokenizer_config.json"))["chat_template"]
    both = [WEATHER, CLOCK_TOOL]
    cases = []

    def case(template, chat, tools=None, prompt=True, **extra):
        entry = {"template": template, "chat": chat, "tools": tools, "add_generation_prompt": prompt, "extra": extra}
        try:
            entry["prompt"] = tokenizer.apply_chat_template(
                CHATS[chat], tools=tools, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=prompt, **extra
            )
        except Exception as error:
            entry["error"] = str(error)
        cases.append(entry)

    TEMPLATES = {
        "demo": demo, "chatml": CHATML, "parts": PARTS, "headers": HEADERS, "alternate": ALTERNATE, "types": TYPES,
        "whitespace": WHITESPACE, "generation": GENERATION, "json": JSON,
        "line ends": LINE_ENDS,
    } | {f"suite {i + 1}": line for i, line in enumerate(SUITE.split("\n"))}
    for chat in ["one", "system", "turns"]:
        for prompt in [False, True]:
            case("demo", chat, prompt=prompt)
    for template in ["chatml", "parts", "headers", "alternate", "types"]:
        for chat in CHATS:
            case(template, chat)
            case(template, chat, tools=both, prompt=False)
    for thinking in [False, True]:
        case("chatml", "thinking", enable_thinking=thinking)
    case("parts", "parts", number_pictures=True)
    case("headers", "tools", tools=[WEATHER], date_string="1 May 2020", tools_in_user_message=False)
    case("headers", "one", custom_tools=[CLOCK_TOOL])
    for chat in ["one", "turns", "tools"]:
        case("whitespace", chat)
        case("generation", chat)
        case("line ends", chat)
    for i in range(len(SUITE.split("\n"))):
        case(f"suite {i + 1}", "turns")
    case("json", "turns", value=VALUE)
    case("json", "turns", value=[VALUE, [[VALUE]]])

    golden = {"clock": CLOCK.isoformat(), "special_tokens": tokenizer.special_tokens_map, "templates": TEMPLATES, "chats": CHATS, "cases": cases}
    (HERE / "templates.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
    print(len(cases), "cases,", sum("error" in c for c in cases), "of them errors")
    for c in cases:
        if "error" in c:
            print(" ", c["template"], c["chat"], c["error"])


main()
