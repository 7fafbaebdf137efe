"""Chat templates run as in transformers, within bounds."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest
from weft.text.chat import ChatFormat
from weft.text.limits import MAX_SECONDS
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer

START = "{% set ns = namespace(x='aaaaaaaa', n=3) %}"
GREEDY = {
    "too many numbers": "{% for i in range(100000) %}{% endfor %}",
    "nested loops": "{% set r = range(60000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "loops over messages": "{% for a in messages %}" * 9 + "{% endfor %}" * 9,
    "doubling by +": START + "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": START + "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by a block": START
    + "{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling by join": START + "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "replace method": START + "{% for i in range(9) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "replace filter": START + "{% for i in range(9) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "repetition": "{{ 'a' * 10**9 }}",
    "big numbers": START + "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 60000) }}",
    "format operator": "{{ '%1000000000d' % 1 }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "indent": "{{ ('\\n' * 60000) | indent(60000) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(60000) }}",
    "json": "{{ messages | tojson(indent=60000) }}",
    "much output": "{% set r = range(60000) %}{% for i in r %}{% for j in r %}aaaaaaaaaa"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
}
FORBIDDEN = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "changing messages": "{{ messages.clear() }}",
    "namespace attributes": "{% set ns = namespace() %}{% set ns.__x = 1 %}",
    "include": "{% include 'other' %}",
    "import": "{% import 'os' as os %}",
    "lipsum": "{{ lipsum(n=5) }}",
}


def render(source: str, seconds: float = 0.5, **variables: Any) -> str:
    return ChatTemplate(source).render({"messages": [1] * 20, **variables}, seconds)


@pytest.mark.requirement("F19")
@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_template_is_stopped(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        render(GREEDY[name])
    assert time.monotonic() - began < deadline(10)
    assert caught.value.param == "messages"
    assert render("{{ 1 }}") == "1", "the next rendering is as ever"


@pytest.mark.requirement("F18")
@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_sandbox_holds(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(FORBIDDEN[name])
    assert "<" not in caught.value.message
    assert "/" not in caught.value.message


def test_format_fields_reach_no_attributes() -> None:
    assert render("{{ '{0.__class__}'.format(1) }}") == ""


@pytest.mark.requirement("F19")
def test_a_greedy_template_does_not_spend_anothers_budget() -> None:
    results: list[str] = []

    def greedy() -> None:
        with pytest.raises(InvalidRequest):
            render(GREEDY["nested loops"], seconds=0.3)

    thread = threading.Thread(target=greedy)
    thread.start()
    while thread.is_alive():
        results.append(render("{% for i in range(50) %}{{ i }}{% endfor %}"))
    assert len(set(results)) == 1


def test_safe_escapes_nothing() -> None:
    """In the reference library, a string beside a value of ``safe`` is escaped as HTML."""
    made = render("{% set x = {'a': '<'} | tojson | safe %}{{ '{\"b\": ' + x + '}' }}{{ x ~ '\"' }}")
    assert made == '{"b": {"a": "<"}}{"a": "<"}"'


def test_exceptions_of_the_template_reach_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="missing"):
        render("{{ nothing.at.all }}")
    with pytest.raises(InvalidRequest, match="line 1"):
        ChatTemplate("{% for %}")


PIECES = [
    "{% for m in messages %}{{ loop.index ~ '/' ~ loop.length ~ loop.last ~ loop.first }}{{ m.role + ': ' }}"
    "{{ m['content'] | trim }}{% if loop.index == 1 %}{% continue %}{% endif %}\n"
    "{{ m | tojson }}{% endfor %}",
    "{% generation %}hi{{ messages | length }}{% endgeneration %}",
    "  {% if true %}\n  x\n  {% endif %}\n{#- c -#} y",
    "{{ messages[1:] | map(attribute='role') | join(', ') }}{{ messages[::-1][0].content.split('<')[-1] }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ ns.n % 4 }}",
    "{{ {'b': '<é>', 'a': [1, none]} | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'x' * 3 }}{{ '%s' % 'y' }}",
    "{% macro f(a, b='d') %}[{{ a ~ b }}]{% endmacro %}{{ f('c') }}{{ 'a.b'.replace('.', '') | upper }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for m in nothing %}{% else %}e{% endfor %}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{{ 'a\nb' | indent(2) }}{{ '{} {:>3}'.format(1, 'z') }}",
    "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}"
    "{{ m.content | string | length }}{% endfor %}",
    "{{ strftime_now('%%') }}{{ dict(a=1).a }}{{ messages[0].get('nope', 'd') }}{{ [3, 1] | sort | first }}",
]


@pytest.mark.parametrize("source", PIECES)
def test_renders_as_transformers_does(source: str) -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "system", "content": " s<1> "}, {"role": "user", "content": "héllo"}]
    theirs, _ = chat.render_jinja_template([messages], chat_template=source)
    assert ChatTemplate(source).render({"messages": messages}) == theirs[0]


NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
ENDLESS = {
    "written": NESTED + "{{ ns.x }}",
    "compared": NESTED + "{% set y = ns.x %}" + NESTED + "{{ ns.x == y }}",
    "as json": NESTED + "{{ ns.x | tojson }}",
    "as text": NESTED + "{{ ns.x | string | length }}",
    "joined": NESTED + "{{ ns.x ~ 'a' }}",
}


@pytest.mark.requirement("F19")
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_one_operation_on_nested_lists_ends_with_its_process(name: str) -> None:
    template = ChatTemplate(ENDLESS[name])
    before = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        template.render({"messages": []})
    assert time.monotonic() - before < deadline(MAX_SECONDS + 2)
    assert caught.value.param == "messages"
    assert ChatTemplate("{{ messages | length }}").render({"messages": [1, 2]}) == "2"


@pytest.mark.requirement("F19")
def test_a_checkpoint_whose_template_has_no_end_loads_and_says_so(
    all_tokenizers: dict[str, Tokenizer],
) -> None:
    before = time.monotonic()
    chat = ChatFormat(all_tokenizers["byte_level"], ENDLESS["written"])
    assert chat.ends_of_turn() == set()
    assert time.monotonic() - before < deadline(MAX_SECONDS + 2)
    assert "--chat-template" in (chat.problem or "")
    before = time.monotonic()
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        chat.encode([{"role": "user", "content": "a"}])
    assert time.monotonic() - before < deadline(0.5)
