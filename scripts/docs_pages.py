"""Hook of mkdocs (``hooks:`` in mkdocs.yml): generated lists, and links that leave ``docs/``.

* The home page is README.md.
* A line ``<!-- list: NAME -->`` of a page becomes the list NAME: flags, metrics, environment or errors. The
  lists are made from the code, so no list can be stale.
* A file outside of ``docs/`` becomes a part of the site (``repository/``) if a page links to the file. Files
  that such pages link to follow. A link to a missing file is a warning, and ``--strict`` ends the build.

The lists need no mkdocs: ``tests/docs/test_site.py`` makes every list.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads the hook by path, without the packages of the checkout

from weft.common import env, errors  # noqa: E402
from weft.config import flags  # noqa: E402
from weft.config.sections.all import Config  # noqa: E402

HOME = "index.md"
"""Generated page of the site: README.md."""
OUTSIDE = "repository"
"""Folder of the site for files from outside of ``docs/``."""
LISTED = {"docs/flags.txt": "reference/flags.md", "docs/metrics.txt": "reference/metrics.md"}
"""Files that have a page of their own in the site: links lead to the page."""
LIST = re.compile(r"^<!-- list: ([a-z]+) -->$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"^ *(```|~~~).*?^ *\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
NESTED_ITEM = re.compile(r"^ {2,3}(?=(?:[*-]|\d+\.) )", re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.docs_pages")


# Lists, made from the code.


def flag_list() -> str:
    """Return the settings as Markdown, one heading per flag, by section."""
    parts = []
    for section in Config.__struct_fields__:
        doc = type(getattr(Config(), section)).__doc__ or ""
        parts.append(f"## {section.capitalize()}\n\n{doc.strip()}")
        for setting in flags.SETTINGS.values():
            if setting.section == section:
                parts.append(_flag(setting))
    return "\n\n".join(parts)


def _flag(setting: flags.Setting) -> str:
    names = [f"`--no-{setting.key}`"] if setting.kind == "bool" else []
    names += [f"`--{setting.alias}`"] if setting.alias else []
    facts = [f"`{setting.type_name}`"]
    facts += [f"range {setting.range_text}"] if setting.range_text else []
    facts += [f"default `{setting.default_text}`"] if setting.default_text != "-" else ["no default"]
    facts += [f"also {' and '.join(names)}"] if names else []
    return f"### `{setting.flag}`\n\n{_text(setting.description)}\n\n{' · '.join(facts)}"


def metric_list() -> str:
    """Return a table of all metrics of docs/metrics.txt, with the help texts of the source."""
    help_texts = metric_help()
    places = {name: place for place, name in enumerate(help_texts)}
    rows = []
    for line in (ROOT / "docs/metrics.txt").read_text(encoding="utf-8").splitlines():
        name, kind, labels, *_ = line.split()
        plain = name.removeprefix("weft:")
        plain = plain if plain in help_texts else plain.removesuffix("_total")
        # On a narrow screen a name may break behind an underscore.
        code = f"<code>{name.replace('_', '_<wbr>')}</code>"
        row = f"| {code} | {_text(help_texts[plain])} | {kind}: {labels.replace(',', ', ')} |"
        rows.append((places[plain], row))
    # In the order of the source, where related metrics follow each other.
    head = ["| metric | meaning | type and labels |", "|---|---|---|"]
    return "\n".join([*head, *(row for _, row in sorted(rows))])


def metric_help() -> dict[str, str]:
    """Return the help text of each metric (without prefix and ``_total``), read from the source.

    The source is parsed, not imported: the import needs numpy and zmq. A help text is the string behind the
    name, in a dict (``name: (help, ...)``), in a tuple (``(name, help, ...)``) or in a call
    (``gauge(name, help, ...)``). A constant of the module may stand for the string.
    """
    names = (
        "metrics",
        "transport_metrics",
        "front_tables",
        "adapter_metrics",
        "tier_metrics",
        "overlap_metrics",
    )
    sources = (ROOT / "weft/front/monitoring" / f"{name}.py" for name in names)
    tree = ast.parse("\n".join(source.read_text(encoding="utf-8") for source in sources))
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: dict[str, str] = {}
    for name, text in _pairs(tree):
        text = constants.get(text.id, text) if isinstance(text, ast.Name) else text
        if _is_text(name) and _is_text(text):
            found.setdefault(name.value, text.value)
    return found


def _pairs(tree: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Yield (node of a possible name, node of a possible help text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(value, ast.Tuple):
                    yield key, value.elts[0]
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1:
            yield node.elts[0], node.elts[1]
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            yield node.args[0], node.args[1]


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def environment_list() -> str:
    """Return a table of the environment variables."""
    rows = ["| variable | meaning |", "|---|---|"]
    rows += [f"| `{name}` | {_text(meaning)} |" for name, meaning in env.VARIABLES.items()]
    return "\n".join(rows)


def error_list() -> str:
    """Return the tree of errors, and a table of all errors by status."""
    tree = ["```", *_tree(errors.WeftError), "```"]
    rows = ["| status | code | retry | cause | meaning |", "|---|---|---|---|---|"]
    for kind in sorted(_kinds(errors.WeftError), key=lambda one: (one.http_status, one.code)):
        retry = "yes" if kind.retryable else "no"
        meaning = _text(kind.__doc__ or "")
        rows.append(f"| {kind.http_status} | `{kind.code}` | {retry} | {kind.blame} | {meaning} |")
    return "\n".join([*tree, "", *rows])


def _kinds(root: type[errors.WeftError]) -> Iterator[type[errors.WeftError]]:
    """Yield the classes below ``root`` that have a code of their own."""
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__ and "code" in vars(kind):
            yield kind
        yield from _kinds(kind)


def _tree(kind: type[errors.WeftError], depth: int = 0) -> Iterator[str]:
    known = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    status = f" {kind.http_status}" if depth else ""
    yield f"{'    ' * depth}{kind.__name__}{status}"
    for one in known:
        if "code" in vars(one):
            yield from _tree(one, depth + 1)


def _text(text: str) -> str:
    """Return a text of the code as Markdown for one cell of a table."""
    plain = " ".join(text.split()).replace("``", "`")
    return re.sub(r"[|<*](?![^`]*`)", lambda found: f"\\{found[0]}", plain)


LISTS: dict[str, Callable[[], str]] = {
    "flags": flag_list,
    "metrics": metric_list,
    "environment": environment_list,
    "errors": error_list,
}


# Links.


class Target(NamedTuple):
    """Target of a relative link."""

    path: str
    """Path in the repository."""
    anchor: str
    """With its ``#``, or ""."""


def source_of(page: str) -> str:
    """Return the repository path of a page of the site."""
    if page == HOME:
        return "README.md"
    inside = f"{OUTSIDE}/"
    return page.removeprefix(inside) if page.startswith(inside) else f"docs/{page}"


def page_of(path: str) -> str:
    """Return the site path of a file of the repository."""
    if path == "README.md":
        return HOME
    if path in LISTED:
        return LISTED[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def target_of(link: str, source: str) -> Target | None:
    """Return the target of a link in the file ``source``; None for other sites and anchors of the page."""
    if link.startswith(("#", "/")) or re.match(r"[a-z]+:", link):
        return None
    path, mark, anchor = link.partition("#")
    return Target(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), mark + anchor)


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Return ``text`` with ``change`` applied to all parts that are not code."""
    parts, at = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def links_of(text: str) -> list[str]:
    """Return the targets of all links and images of a Markdown text."""
    # The text of a link may have code, so code becomes a space here.
    return [link[2] for link in LINK.finditer(CODE.sub(" ", text))]


def files_outside() -> list[str]:
    """Return the repository paths of all files outside of ``docs/`` that pages link to, directly or not."""
    waiting = ["README.md", *(str(one.relative_to(ROOT)) for one in sorted((ROOT / "docs").rglob("*.md")))]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        for link in links_of((ROOT / source).read_text(encoding="utf-8")):
            target = target_of(link, source)
            if target is None or target.path in seen or not (ROOT / target.path).is_file():
                continue
            seen.add(target.path)
            if target.path.endswith(".md"):
                waiting.append(target.path)
    return sorted(path for path in seen if not path.startswith("docs/") and path != "README.md")


def site_text(text: str, page: str) -> str:
    """Return a page's Markdown for the site: lists made, links turned, nested lists indented by four.

    GitHub reads a list within a list at two spaces, mkdocs at four.
    """
    source = source_of(page)

    def turn(link: re.Match[str]) -> str:
        target = target_of(link[2], source)
        if target is None:
            return link[0]
        if not (ROOT / target.path).is_file():
            log.warning("%s links to %s, which is not a file", source, link[2])
            return link[0]
        # The page of a list links to the file itself.
        to = page_of(target.path) if page_of(target.path) != page else target.path.removeprefix("docs/")
        place = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{link[1]}{place}{target.anchor}{link[3]}"

    def change(part: str) -> str:
        # `[a][b]` is text here: no page has references, and mkdocs would search the Python API for b.
        return NESTED_ITEM.sub("    ", LINK.sub(turn, part)).replace("][", "]\\[")

    changed = outside_of_code(text, change)
    return LIST.sub(lambda found: LISTS[found[1]](), changed)


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor of a heading, as GitHub makes the anchor: so links work in both places."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


# Events of mkdocs.


def on_config(config: Any) -> Any:
    """Set the anchors of headings. mkdocs.yml cannot name a function without mkdocs' own YAML tags."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the home page, and the files from outside of ``docs/``."""
    from mkdocs.structure.files import File, InclusionLevel

    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    for path in files_outside():
        added = File.generated(config, page_of(path), abs_src_path=str(ROOT / path))
        added.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page for the site. Results and logs of changes stay out of the search."""
    where = page.file.src_uri
    if where == HOME:
        page.meta["hide"] = ["navigation"]  # the part of the navigation has one page
    if where.startswith(OUTSIDE):
        page.meta["search"] = {"exclude": True}
    return site_text(markdown, where)
