"""The page at ``/`` in a real browser, over a server with scripted outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import CHROMIUM, Browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1234 * (2 + 3)"}}\n</tool_call>'
MARKUP = """# Title

<b>not bold</b> and `code`

```
<script>1</script>
```
- one
- two

[x](javascript:1) [y](https://a.b/)"""
SCRIPT = [
    {"match": "1234", "text": "Let me see. " + CALL},
    {"match": {"contains": ["6170"]}, "text": "It is **6170**."},
    {
        "match": "markup",
        "text": MARKUP,
    },
    {"match": "slow", "text": "word " * 400, "delay_ms": 50, "repeat": True},
    {"text": "Hello.", "repeat": True},
]


@pytest.fixture
def server(start_weft: Any, tmp_path: Path) -> Any:
    script, template = tmp_path / "script.yaml", tmp_path / "template.jinja"
    script.write_text(json.dumps(SCRIPT))
    template.write_text(TEMPLATE)
    return start_weft(
        "--scripted", str(script), "--chat-template", str(template), "--tool-call-parser", "hermes"
    )


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as one:
        yield one


def ask(browser: Browser, text: str) -> None:
    browser.evaluate("document.getElementById('question').focus()")
    browser.write(text)
    browser.press("Enter", 13, "\r")


def log(browser: Browser) -> str:
    return str(browser.evaluate("document.getElementById('log').innerText"))


def test_it_loads_nothing_from_elsewhere_and_needs_no_key(server: Any) -> None:
    answer = server.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "src=" not in answer.text
    assert "@import" not in answer.text
    assert server.http.head("/").status_code == 200


@needs_browser
def test_a_conversation_with_a_tool_call_and_what_the_charts_say(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    assert server.model in browser.evaluate("document.getElementById('card').innerText")
    browser.evaluate("document.getElementById('calculator').click()")
    ask(browser, "What is 1234 times 5?")
    browser.wait("document.getElementById('log').innerText.includes('It is 6170.')")
    text = log(browser)
    assert "Let me see." in text
    assert '{"expression": "1234 * (2 + 3)"}' in text
    assert "6170\n" in text
    assert "<tool_call>" not in text
    assert browser.evaluate("document.querySelector('#log strong:last-child') !== null")
    assert browser.evaluate("document.activeElement.id") == "question", "the next message can be typed"
    browser.wait("document.getElementById('heads').rows.length === 1")
    browser.wait("document.querySelector('#tokens polyline').getAttribute('points').length > 0")
    label = browser.evaluate("document.getElementById('ttft').getAttribute('aria-label')")
    assert "Time to first token, median and 99%" in label
    browser.wait("document.getElementById('ttft-now').textContent.includes('ms')")
    assert browser.complaints() == []
    assert {url.split("/")[2] for url in browser.asked() if url.startswith("http")} == {
        server.url.split("/")[2]
    }


@needs_browser
def test_text_of_the_model_is_text(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    ask(browser, "markup please")
    browser.wait("document.querySelector('#log a') !== null")  # the link is the last element to appear
    assert browser.evaluate("document.querySelectorAll('#log li').length") == 2
    assert browser.evaluate("document.querySelectorAll('#log b, #log script').length") == 0
    assert "<b>not bold</b>" in log(browser)
    assert browser.evaluate("document.querySelector('#log pre').textContent") == "<script>1</script>\n"
    links = browser.evaluate("[...document.querySelectorAll('#log a')].map((a) => a.href)")
    assert links == ["https://a.b/"]
    assert browser.complaints() == []


@needs_browser
def test_escape_stops_a_reply_and_the_server_hears_of_it(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    ask(browser, "slow")
    browser.wait("document.getElementById('log').innerText.includes('word word')")
    browser.press("Escape", 27)
    browser.wait("document.getElementById('log').innerText.includes('Stopped.')")
    server.wait(lambda: server.metric("num_requests_running") == 0, 10)
    browser.evaluate("document.getElementById('fresh').click()")
    assert log(browser).strip() == ""
    ask(browser, "slow")
    browser.wait("document.getElementById('log').innerText.includes('word word')")
    browser.evaluate("document.getElementById('fresh').click()")
    browser.wait("running === null")
    assert browser.evaluate("conversation.length") == 0, "what came of the old one is no part of the new one"
    ask(browser, "hello")
    browser.wait("document.getElementById('log').innerText.includes('Hello.')")


@needs_browser
def test_names_roles_and_contrast(server: Any, browser: Browser) -> None:
    """A screen reader finds a name for every control, landmarks, headings and a focus order."""
    browser.open(server.url + "/")
    browser.wait("document.getElementById('heads').rows.length === 1")
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node.get("role", {}).get("value")
    ]
    controls = {"button", "textbox", "spinbutton", "checkbox", "link", "meter", "image", "log", "table"}
    assert [pair for pair in named if pair[0] in controls and not pair[1]] == []
    roles = [role for role, _ in named]
    for landmark in ("banner", "main", "navigation", "log", "status"):
        assert landmark in roles, landmark
    browser.evaluate("document.activeElement.blur()")
    browser.press("Tab", 9, "\t")
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the chat"


@needs_browser
def test_a_server_with_a_key_asks_for_it(start_weft: Any, tmp_path: Path, browser: Browser) -> None:
    script = tmp_path / "script.yaml"
    script.write_text(json.dumps([{"text": "Hello.", "repeat": True}]))
    server = start_weft("--scripted", str(script), "--api-key", "sesame")
    assert httpx.get(server.url + "/v1/models").status_code == 401
    browser.open(server.url + "/")
    browser.wait("!document.getElementById('key-form').hidden")
    assert browser.evaluate("document.getElementById('state').textContent") == "an API key is needed"
    browser.evaluate("document.getElementById('key').focus()")
    browser.write("sesame")
    browser.press("Enter", 13, "\r")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("document.getElementById('key-form').hidden")
    ask(browser, "hi")
    browser.wait("document.getElementById('log').innerText.includes('Hello.')")


DROP = """(async () => {
  const canvas = document.createElement('canvas');
  const file = new File([await new Promise((made) => canvas.toBlob(made))], 'a.png', { type: 'image/png' });
  const data = new DataTransfer();
  data.items.add(file);
  const event = new %s('%s', { bubbles: true, cancelable: true, %s: data });
  document.getElementById('question').dispatchEvent(event);
})()"""
DROPPED, PASTED = (
    DROP % ("DragEvent", "drop", "dataTransfer"),
    DROP % ("ClipboardEvent", "paste", "clipboardData"),
)


@needs_browser
def test_an_image_goes_with_a_message_where_the_model_sees(start_fake: Any, browser: Browser) -> None:
    seeing = start_fake(vision=True)
    browser.open(seeing.url + "/")
    browser.wait("!document.getElementById('attach').hidden")
    browser.evaluate(DROPPED)
    browser.wait("document.querySelectorAll('#images img').length === 1")
    browser.evaluate(PASTED)
    browser.wait("document.querySelectorAll('#images img').length === 2")
    browser.evaluate("document.querySelector('#images button').click()")
    browser.wait("document.querySelectorAll('#images img').length === 1")
    ask(browser, "look")
    browser.wait("document.querySelectorAll('#log img').length === 1")
    parts = browser.evaluate("conversation[0].content.map((part) => part.type)")
    assert parts == ["image_url", "text"]
    assert browser.evaluate("images.length") == 0
    assert not [one for one in browser.complaints() if "Content Security" in one]


@needs_browser
def test_an_image_is_refused_with_a_message_where_it_does_not(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    assert browser.evaluate("document.getElementById('attach').hidden")
    for give in (DROPPED, PASTED):
        browser.evaluate("complain('')")
        browser.evaluate(give)
        browser.wait("document.getElementById('problem').textContent.includes('takes no images')")
    assert browser.evaluate("images.length") == 0


@needs_browser
def test_charts_have_axes_and_the_chat_comes_before_them(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.querySelector('#tokens polyline') !== null")
    labels = browser.evaluate(
        "[...document.querySelectorAll('#tokens + .axis span')].map((one) => one.textContent)"
    )
    assert labels == ["1", "0.5", "0", "2 min ago", "1 min ago", "now"]
    browser.send(
        "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True
    )
    top = "document.getElementById('%s-section').getBoundingClientRect().top"
    assert browser.evaluate(top % "chat") < browser.evaluate(top % "load")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    browser.send(
        "Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False
    )
    gap = "document.getElementById('load-section').getBoundingClientRect().top"
    gap += " - document.getElementById('model-section').getBoundingClientRect().bottom"
    closed = browser.evaluate(gap)
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate(gap) == closed, "settings leave no hole above the charts"


@needs_browser
@pytest.mark.parametrize(("value", "top"), [(0.011, 0.02), (1, 1), (1.1, 2), (4, 5), (7, 10), (1200, 2000)])
def test_the_top_of_an_axis_is_round(server: Any, browser: Browser, value: float, top: float) -> None:
    browser.open(server.url + "/")
    assert browser.evaluate(f"roundUp({value})") == pytest.approx(top)
