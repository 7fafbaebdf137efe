"""The page at ``/`` in a real browser, over a server with scripted outputs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import CHROMIUM, Browser
from tests.support.slowness import deadline
from weft.config.about import EXAMPLE_IMAGE

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
    {"match": {"contains": ["6170"]}, "text": "It is **6170**.", "repeat": True},
    {"match": "1234", "text": "Let me see. " + CALL, "repeat": True},
    {
        "match": "markup",
        "text": MARKUP,
        "repeat": True,
    },
    {"match": "slow", "text": "word " * 400, "delay_ms": 50, "repeat": True},
    {"text": "Hello.", "repeat": True},
]


@pytest.fixture(scope="module")
def server(start_weft: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    script, template = folder / "script.yaml", folder / "template.jinja"
    script.write_text(json.dumps(SCRIPT))
    template.write_text(TEMPLATE)
    names = ("--served-model-name", "spool-text", "--served-model-name", "other")
    return start_weft(
        "--scripted", str(script), "--chat-template", str(template), "--tool-call-parser", "hermes", *names
    )


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as one:
        yield one


def ask(browser: Browser, text: str) -> None:
    browser.evaluate("document.getElementById('question').focus()")
    browser.write(text)
    browser.press("Enter", 13, "\r")


def click(browser: Browser, element: str) -> None:
    """Clicks with the mouse, so that the page has the rights of a user's gesture."""
    box = browser.evaluate(
        f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
        f"(({element}.scrollIntoView(), {element}).getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


def point_until(browser: Browser, point: Callable[[], object], expression: str) -> None:
    """Repeat ``point`` until the expression is true. The page may move its parts before the pointer acts."""
    for _ in range(10):
        point()
        until = time.monotonic() + deadline(1)
        while time.monotonic() < until:
            if browser.evaluate(expression):
                return
            time.sleep(0.05)
    raise AssertionError(f"never true: {expression}")


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
    browser.wait("document.querySelector('#tokens .line').getAttribute('d').length > 0")
    label = browser.evaluate("document.getElementById('ttft').getAttribute('aria-label')")
    assert label == "Time to first token: median and p99"
    browser.wait("/\\d/.test(document.getElementById('ttft-now').textContent)")
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
    controls |= {"combobox", "slider"}
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
    assert browser.evaluate("document.getElementById('state').textContent") == "the server needs an API key"
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
        browser.wait("document.getElementById('problem').textContent.includes('does not accept images')")
    assert browser.evaluate("images.length") == 0


@needs_browser
def test_charts_have_axes_with_units(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.querySelector('#tokens .line') !== null")

    def labels(chart: str) -> Any:
        return browser.evaluate(
            f"[...document.querySelectorAll('#{chart} text')].map((one) => one.textContent)"
        )

    units = {"tokens": "tokens/s", "rows": "rows", "queue": "sequences", "ttft": "ms", "itl": "ms", "kv": "%"}
    for chart, unit in units.items():
        found = labels(chart)
        assert found[0] == unit
        assert all(re.fullmatch(r"[\d.,]+", label) for label in found[1:4]), found
        assert found[4:] == ["−10 min", "−5 min", "now"]
    assert labels("kv")[1:4] == ["100", "50", "0"]
    browser.evaluate("period_ = document.getElementById('period'), period_.value = '120'")
    browser.evaluate("period_.dispatchEvent(new Event('change'))")
    assert labels("kv")[4:] == ["−2 min", "−1 min", "now"]


@needs_browser
def test_the_pointer_and_the_keyboard_show_values_with_their_time(server: Any, browser: Browser) -> None:
    server.wait(lambda: len(server.http.get("/metrics/history").json()["points"]) > 3, 10)
    browser.open(server.url + "/")
    browser.wait("points.length > 3")
    shown = r"\d\d:\d\d:\d\d\s*output [\d.,]+ tokens/s\s*prompts [\d.,]+ tokens/s"
    tip = "document.querySelector('#tokens + .tip')"
    place = "(({x, y, width}) => [x, y, width])($('tokens').getBoundingClientRect())"

    def move() -> None:
        x, y, width = browser.evaluate(f"(document.getElementById('tokens').scrollIntoView(), {place})")
        browser.send("Input.dispatchMouseEvent", x=5, y=5, type="mouseMoved")
        browser.send("Input.dispatchMouseEvent", x=x + width - 10, y=y + 40, type="mouseMoved")

    point_until(browser, move, f"!{tip}.hidden")
    (x, _, width), text, left, right = browser.evaluate(
        f"((tip, box) => [{place}, tip.innerText, box.left, box.right])({tip}, {tip}.getBoundingClientRect())"
    )
    assert re.fullmatch(shown, text)
    assert x - 1 <= left < right <= x + width + 1, "the values stay within the chart"
    browser.send("Input.dispatchMouseEvent", x=5, y=5, type="mouseMoved")
    browser.wait(f"{tip}.hidden")
    browser.evaluate("$('tokens').focus()")
    browser.wait(f"!{tip}.hidden")
    last = browser.evaluate("CHARTS[0].at")
    browser.press("ArrowLeft", 37)
    assert browser.evaluate("CHARTS[0].at") < last
    said = browser.evaluate("$('tokens').getAttribute('aria-valuetext')")
    assert re.fullmatch(shown.replace(r"\s*", ",? "), said)
    browser.press("Home", 36)
    assert browser.evaluate("CHARTS[0].at === shown()[0].second")
    browser.press("Escape", 27)
    assert browser.evaluate(f"{tip}.hidden")


@needs_browser
def test_history_is_there_right_after_load(server: Any, browser: Browser) -> None:
    """The page shows what happened before the page was opened, and goes on without a doubled second."""
    server.complete("hello", max_tokens=1)
    server.wait(lambda: len(server.http.get("/metrics/history").json()["points"]) > 4, 10)
    browser.open(server.url + "/")
    browser.wait("points.length > 0")
    kept = browser.evaluate("points.length")
    assert kept > 3
    browser.wait(f"points.length > {kept} || points.length === KEPT")
    seconds = browser.evaluate("points.map((one) => one.second)")
    assert seconds == sorted(set(seconds))
    browser.wait("/L/.test(document.querySelector('#queue .line').getAttribute('d'))")
    # Another server at the same address, e.g. after a reboot, has a clock of its own.
    browser.evaluate("take({now: 5, columns: ['second'], points: [[5]]})")
    assert browser.evaluate("points.length") == 1


CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = channels(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const worst = [];
  const own = (one) => [...one.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data);
  for (const one of document.body.querySelectorAll('*')) {
    const text = own(one).join('').trim();
    if ((!text && !one.placeholder) || !one.getClientRects().length) continue;
    if (/SCRIPT|OPTION/.test(one.tagName)) continue;
    const style = getComputedStyle(one, one.placeholder ? '::placeholder' : null);
    const pair = [light(channels(one instanceof SVGElement ? style.fill : style.color)), light(behind(one))];
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (contrast < 4.5) worst.push([one.tagName, one.id, text || one.placeholder, contrast]);
  }
  return worst;
})()"""
SCROLLERS = """[...document.querySelectorAll('body, body *')].filter((one) =>
  one.scrollWidth > one.clientWidth + 1 && !one.closest('.hidden, textarea, thead') &&
  one.clientWidth && getComputedStyle(one).overflowX !== 'visible' && !(one instanceof SVGElement)
).map((one) => one.tagName + one.id + one.className)"""


def resize(browser: Browser, width: int, height: int = 900) -> None:
    browser.send(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=1,
        mobile=width < 600,
    )


@needs_browser
def test_every_size_and_scheme(server: Any, browser: Browser) -> None:
    """No part scrolls sideways on a phone or a large screen, and text has a contrast of at least 4.5."""
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("document.getElementById('heads').rows.length === 1")
    ask(browser, "markup please")
    browser.wait("document.querySelector('#log .stats span') !== null")
    browser.evaluate("complain('a problem'), document.querySelector('#chat-section details').open = true")
    top = "document.getElementById('%s-section').getBoundingClientRect().%s"
    for width in (390, 1400, 2560):
        resize(browser, width)
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.send("Emulation.setEmulatedMedia", features=features)
            browser.evaluate("$('tokens').focus(), point(CHARTS[0], serverNow)")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(SCROLLERS) == [], (width, scheme)
            assert browser.evaluate(CONTRAST) == [], (width, scheme)
    resize(browser, 390, 844)
    assert browser.evaluate(top % ("chat", "bottom")) < browser.evaluate(top % ("load", "top"))
    assert browser.evaluate(top % ("load", "bottom")) < browser.evaluate(top % ("model", "top"))
    for width, above in ((390, "chat"), (900, "chat"), (1400, "model"), (2560, "model")):
        resize(browser, width)
        gap = f"{top % ('load', 'top')} - {top % (above, 'bottom')}"
        browser.evaluate("document.querySelector('#chat-section details').open = false")
        closed = browser.evaluate(gap)
        assert 0 < closed < 40
        browser.evaluate("document.querySelector('#chat-section details').open = true")
        assert browser.evaluate(gap) == closed, "settings leave no hole above the charts"
    assert browser.complaints() == []


def fleet(browser: Browser) -> Any:
    """Return the groups on the page: name, role, state and the visible buttons."""
    return browser.evaluate(
        "[...document.querySelectorAll('#groups tr')].map((row) => [row.cells[0].textContent, "
        "row.cells[1].textContent, row.cells[2].textContent, "
        "[...row.querySelectorAll('button:not([hidden])')].map((one) => one.textContent).join()])"
    )


@needs_browser
def test_an_operator_sees_and_changes_the_groups(start_fake: Any, browser: Browser) -> None:
    """The page asks for the admin key, shows the groups, and drains one after a second click."""
    server = start_fake(engines=2, most_engines=2, admin_key=["secret"], fronts=2)
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.evaluate("$('fleet').open = true")
    browser.wait("!$('admin-form').hidden")
    for key, shown in (
        ("wrong", "$('fleet-note').textContent === 'The admin key is wrong.'"),
        ("secret", ""),
    ):
        browser.evaluate("$('admin-key').focus()")
        browser.write(key)
        browser.press("Enter", 13, "\r")
        browser.wait(shown or "document.querySelectorAll('#groups tr').length === 2")
    both = [
        ["unified0", "unified", "running", "Drain,Restart"],
        ["unified1", "unified", "running", "Drain,Restart"],
    ]
    assert fleet(browser) == both
    for width in (390, 1120, 1400):
        resize(browser, width)
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.send("Emulation.setEmulatedMedia", features=features)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(SCROLLERS) == [], (width, scheme)
            assert browser.evaluate(CONTRAST) == [], (width, scheme)
    button = "document.querySelector('#groups tr:last-child button')"
    click(browser, button)
    browser.wait(f"{button}.textContent === 'Really drain?'")
    assert browser.evaluate(f"{button}.getAttribute('aria-label')") == "Really drain? unified1"
    click(browser, button)
    browser.wait("document.querySelectorAll('#groups tr').length === 1")
    assert browser.evaluate("$('fleet-note').textContent") == "draining unified1"
    click(browser, button)
    browser.wait(f"{button}.textContent === 'Really drain?'")
    click(browser, button)
    browser.wait("$('fleet-note').textContent.includes('without a unified group')")
    assert not [one for one in browser.complaints() if "Content Security" in one]


@needs_browser
def test_a_retired_group_is_revived_on_the_page(start_fake: Any, script: Any, browser: Browser) -> None:
    server = start_fake(engines=2, most_engines=2, admin_key=["secret"])
    server.complete("abc", seed=script.DIE_ONCE, max_tokens=50)
    browser.open(server.url + "/")
    browser.evaluate("adminKey = 'secret', $('fleet').open = true")
    browser.wait(
        "[...document.querySelectorAll('#groups tr')].some((row) => row.innerText.includes('retired'))"
    )
    button = (
        "[...document.querySelectorAll('#groups button:not([hidden])')].find((b) => b.innerText === 'Revive')"
    )
    click(browser, button)
    browser.wait(
        "[...document.querySelectorAll('#groups tr')].every((row) => row.cells[2].textContent === 'running')"
    )


@needs_browser
def test_without_an_admin_key_the_page_says_how_to_get_one(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.evaluate("$('fleet').open = true")
    browser.wait("$('fleet-note').textContent.includes('--admin-key')")
    assert browser.evaluate("$('admin-form').hidden && $('fleet-table').hidden")


@needs_browser
def test_a_reply_shows_its_speed_and_can_be_copied(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    ask(browser, "slow")
    browser.wait("document.getElementById('log').innerText.includes('word word word word')")
    assert browser.evaluate("document.querySelector('#log .stats') === null")
    browser.press("Escape", 27)
    browser.wait("document.querySelector('#log .stats span') !== null")
    found = re.fullmatch(
        r"(\d+) tokens · ([\d.]+) tokens/s · first token after ([\d.]+ m?s)",
        browser.evaluate("document.querySelector('#log .stats span').textContent"),
    )
    assert found is not None, "a stopped reply has a count, too"
    assert int(found[1]) >= 4
    assert 1 < float(found[2]) < 25  # the script has a token each 50 ms
    button = "document.querySelector('#log .stats button')"
    clipboard = "Object.defineProperty(navigator, 'clipboard', {value: %s, configurable: true})"
    browser.evaluate(clipboard % "{writeText: async (text) => (window.copied = text)}")
    point_until(browser, lambda: click(browser, button), f"{button}.textContent === 'Copied'")
    assert browser.evaluate("window.copied").startswith("word word word")
    browser.evaluate(clipboard % "undefined")  # as on a page without HTTPS
    browser.evaluate(f"{button}.textContent = 'Copy'")
    point_until(browser, lambda: click(browser, button), f"{button}.textContent === 'Copied'")
    assert browser.evaluate("document.querySelector('body > textarea') === null")


@needs_browser
def test_speeds_are_of_the_decode_or_of_the_whole_time(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    for reply, text in (
        (
            {"tokens": 21, "sent": 0, "first": 100, "last": 1100},
            "21 tokens · 20 tokens/s · first token after 100 ms",
        ),
        (
            {"tokens": 10, "sent": 0, "first": 40, "last": 50},
            "10 tokens · 200 tokens/s · first token after 40 ms",
        ),
        (
            {"tokens": 1, "sent": 0, "first": 2500, "last": 2500},
            "1 token · 0.4 tokens/s · first token after 2.5 s",
        ),
        ({"tokens": 0, "sent": 5, "first": 0, "last": 0}, ""),
    ):
        assert browser.evaluate(f"stats({json.dumps(reply)})") == text


@needs_browser
def test_the_model_is_chosen_and_examples_are_of_the_model(server: Any, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait("document.querySelectorAll('#examples button').length === 3")
    assert browser.evaluate("[...$('model-choice').options].map((one) => one.value)") == [
        "spool-text",
        "other",
    ]
    browser.evaluate(
        "$('model-choice').value = 'other', $('model-choice').dispatchEvent(new Event('change'))"
    )
    assert browser.evaluate("model") == "other"
    browser.evaluate("document.querySelector('#examples button').click()")
    browser.wait("document.getElementById('log').innerText.includes('Hello.')")
    assert "Tom has 12 apples" in log(browser)
    assert browser.evaluate("$('examples').hidden")
    sent = [e["params"]["request"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    (body,) = [json.loads(one["postData"]) for one in sent if one["method"] == "POST"]
    assert body["model"] == "other"
    browser.evaluate("$('fresh').click()")
    assert not browser.evaluate("$('examples').hidden")


@needs_browser
def test_a_model_that_reads_images_gets_one_by_picker_and_by_example(
    start_weft: Any, tmp_path: Path, browser: Browser
) -> None:
    server = start_weft("spool-vision")
    large = tmp_path / "large.png"
    large.write_bytes(b"x" * (5 << 20))
    browser.open(server.url + "/")
    browser.wait("!document.getElementById('attach').hidden")
    root = browser.send("DOM.getDocument")["root"]["nodeId"]
    picker = browser.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    browser.send("DOM.setFileInputFiles", files=[str(large)], nodeId=picker)
    browser.wait("document.getElementById('problem').textContent !== ''")
    said = browser.evaluate("document.getElementById('problem').textContent")
    assert said == "large.png has 5.0 MiB. An image can have at most 4 MiB."
    browser.send("DOM.setFileInputFiles", files=[str(EXAMPLE_IMAGE)], nodeId=picker)
    browser.wait("document.querySelectorAll('#images img').length === 1")
    ask(browser, "Read the line.")
    browser.wait("document.querySelector('#log .stats span') !== null")
    by_picker = browser.evaluate("document.querySelector('#log article:last-child p').textContent")
    browser.evaluate("$('fresh').click()")
    browser.evaluate("document.querySelector('#examples button').click()")
    browser.wait("document.querySelector('#log .stats span') !== null")
    assert browser.evaluate("document.querySelectorAll('#log img').length") == 1
    assert browser.evaluate("document.querySelector('#log article:last-child p').textContent") == by_picker
    assert len(by_picker) > 3
    browser.evaluate(f"$('fresh').click(), images = ['data:,' + 'x'.repeat({6 << 20})]")
    browser.send("DOM.setFileInputFiles", files=[], nodeId=picker)
    browser.evaluate(f"attach([new File([new Uint8Array({1 << 20})], 'b.png', {{ type: 'image/png' }})])")
    browser.wait("document.getElementById('problem').textContent.includes('at most 5 MiB together')")
    assert browser.complaints() == []


@needs_browser
@pytest.mark.parametrize(("value", "top"), [(0.011, 0.02), (1, 1), (1.1, 2), (4, 5), (7, 10), (1200, 2000)])
def test_the_top_of_an_axis_is_round(server: Any, browser: Browser, value: float, top: float) -> None:
    browser.open(server.url + "/")
    assert browser.evaluate(f"roundUp({value})") == pytest.approx(top)
