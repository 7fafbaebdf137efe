"""The site of the docs (``make docs``), without mkdocs: navigation, generated lists, and turned links."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from weft.common import env, errors
from weft.config import flags

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The hook of mkdocs, imported by path as mkdocs imports the hook."""
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / CONFIG["hooks"][0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from paths(entry)


def has_code(kind: Any) -> bool:
    below = isinstance(kind, type) and issubclass(kind, errors.WeftError) and kind is not errors.WeftError
    return below and "code" in vars(kind)


def test_every_page_is_in_the_navigation_once(site: ModuleType) -> None:
    assert sorted(paths(CONFIG["nav"])) == sorted([site.HOME, *PAGES])


def test_the_navigation_has_four_parts_with_an_index_each() -> None:
    home, *parts = CONFIG["nav"]
    assert list(home) == ["Weft"]
    assert [list(part) for part in parts] == [["Start"], ["Guides"], ["Reference"], ["Explanation"]]
    for part in parts:
        ((name, entries),) = part.items()
        assert entries[0] == f"{name.lower()}/index.md"


def test_no_broken_link_is_left_unseen() -> None:
    assert CONFIG["strict"] is True
    assert set(CONFIG["validation"]["links"].values()) == {"warn"}
    assert set(CONFIG["validation"]["nav"].values()) == {"warn"}


def test_each_list_stands_on_one_page_and_has_all_names(site: ModuleType) -> None:
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
    assert Counter(name for text in texts for name in site.LIST.findall(text)) == dict.fromkeys(site.LISTS, 1)
    wanted = {
        "flags": [f"### `{setting.flag}`" for setting in flags.SETTINGS.values()],
        "metrics": [f">{line.split()[0]}<" for line in (ROOT / "docs/metrics.txt").read_text().splitlines()],
        "environment": [f"`{name}`" for name in env.VARIABLES],
        "errors": [f"`{kind.code}`" for kind in vars(errors).values() if has_code(kind)],
    }
    for name, make in site.LISTS.items():
        text = make().replace("<wbr>", "")
        assert [one for one in wanted[name] if one not in text] == []
        assert "|  |" not in text, f"an empty cell in the list of {name}"


@pytest.mark.parametrize(
    ("page", "text", "turned"),
    [
        ("http.md", "[a](agents.md#both)", "[a](agents.md#both)"),
        ("http.md", "[`m`](metrics.txt)", "[`m`](reference/metrics.md)"),
        ("reference/metrics.md", "[a](../metrics.txt)", "[a](../metrics.txt)"),
        ("http.md", "[a](../README.md)", "[a](index.md)"),
        ("adr/README.md", "[a](../../CHANGELOG.md)", "[a](../repository/CHANGELOG.md)"),
        ("index.md", "[a](docs/http.md#keys)", "[a](http.md#keys)"),
        ("index.md", "![a](docs/images/page-light.png)", "![a](images/page-light.png)"),
        ("repository/CHANGELOG.md", "[a](README.md)", "[a](../index.md)"),
        ("http.md", "[a](https://example.org/a.md)", "[a](https://example.org/a.md)"),
        ("http.md", "`[a](../README.md)`", "`[a](../README.md)`"),
        ("http.md", "```\n[a](../README.md)\n  * b\n```", "```\n[a](../README.md)\n  * b\n```"),
        ("http.md", "[0-9][a-z]", "[0-9]\\[a-z]"),
        ("http.md", "* a\n  * b", "* a\n    * b"),
    ],
)
def test_links_lead_to_the_place_in_the_site(site: ModuleType, page: str, text: str, turned: str) -> None:
    assert site.site_text(text, page) == turned


def test_a_link_to_a_missing_file_is_a_warning(site: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert site.site_text("[a](../bench/none.md)", "http.md") == "[a](../bench/none.md)"
    assert "docs/http.md links to ../bench/none.md" in caplog.text


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Limits", "limits"),
        ("When roles pay, and when not", "when-roles-pay-and-when-not"),
        ("/v1/responses", "v1responses"),
        ("Reads A - B", "reads-a---b"),
        ("max_num_seqs", "max_num_seqs"),
    ],
)
def test_anchors_are_those_of_github(site: ModuleType, heading: str, anchor: str) -> None:
    assert site.slug(heading) == anchor


def test_files_that_results_link_to_follow(site: ModuleType) -> None:
    found = site.files_outside()
    assert "bench/results/summary-zen5.md" in found
    assert "bench/results/summary-zen5.svg" in found
    assert all((ROOT / path).is_file() for path in found)
