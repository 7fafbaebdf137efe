"""``weft eval``: equal scores of Weft and the reference, and the content of the report."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import Server
from weft.cli.evaluate.evaluate import score, tool_report
from weft.cli.evaluate.tool_answers import read_message
from weft.cli.main import main
from weft.eval.gsm_mini import test_set as problem_set
from weft.eval.tools_mini import tool_test_set
from weft.eval.tools_score import Dialogue


def test_scores_count_exact_answers() -> None:
    problems = problem_set(4)
    texts = [problems[0].solution, f"#### {problems[1].answer + 1}", "no idea", problems[3].solution]
    report = score(problems, texts, "some model")
    assert (report["exact"], report["total"], report["accuracy"]) == (2, 4, 0.5)
    assert (report["task"], report["target"]) == ("gsm-mini", "some model")
    assert [row["answer"] for row in report["problems"]][2] is None
    assert report["problems"][1]["expected"] == problems[1].answer


def test_weft_and_the_reference_answer_alike(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the transformers package")
    answers = {}
    for name, more in (("weft", []), ("reference", ["--reference"])):
        file = tmp_path / f"{name}.json"
        flags = ["--limit", "6", "--max-tokens", "8", "--concurrency", "3", "--dtype", "float64"]
        with pytest.raises(SystemExit) as ended:
            main(["eval", "gsm-mini", checkpoint, *flags, "--json", str(file), *more])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith("gsm-mini: ")
        answers[name] = [row["text"] for row in json.loads(file.read_text())["problems"]]
    assert answers["weft"] == answers["reference"]
    assert len(set(answers["weft"])) > 1


@pytest.fixture
def with_tools(checkpoint: str, tmp_path: Path) -> str:
    """Return a copy of the tiny checkpoint with a template that shows tools."""
    pytest.importorskip("transformers", reason="needs the transformers package")
    from training.tokenizer import TOOL_TEMPLATE

    folder = tmp_path / "with-tools"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return str(folder)


@pytest.mark.slow
def test_tools_are_asked_alike_of_weft_the_reference_and_a_server(
    with_tools: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model calls nothing: all write the same text, which is no answer."""
    answers = {}
    server = Server(tmp_path, with_tools, "--port", "0", "--dtype", "float64")
    try:
        places = {"weft": [with_tools], "reference": [with_tools, "--reference"]}
        for name, place in (*places.items(), ("server", ["--url", server.url()])):
            file = tmp_path / f"{name}.json"
            flags = ["--limit", "5", "--max-tokens", "8", "--concurrency", "3"]
            flags += [] if name == "server" else ["--dtype", "float64"]
            with pytest.raises(SystemExit) as ended:
                main(["eval", "tools-mini", *place, *flags, "--json", str(file)])
            assert ended.value.code == 0
            assert capsys.readouterr().out.startswith("tools-mini: ")
            answers[name] = answers_in(file)
    finally:
        server.close()
    assert answers["weft"] == answers["reference"] == answers["server"]
    assert len(set(answers["weft"])) > 1


def answers_in(file: Path) -> list[str]:
    report = json.loads(file.read_text())
    assert (report["task"], report["total"]) == ("tools-mini", 5)
    return [row["text"] for row in report["problems"]]


def test_a_report_of_calls() -> None:
    problem = next(p for p in tool_test_set() if p.calls)
    right, silent = Dialogue(problem), Dialogue(problem)
    for call in problem.calls:
        right.take("", [(call.name, call.arguments)])
    right.take(problem.solution, [])
    silent.take(problem.solution, [])
    report = tool_report([right, silent], "some model")
    assert (report["task"], report["target"]) == ("tools-mini", "some model")
    assert [report[key] for key in ("calls", "answers", "both", "total")] == [1, 2, 1, 2]
    assert [row["calls_right"] for row in report["problems"]] == [True, False]
    assert len(report["problems"][0]["calls"]) == len(problem.calls)
    json.dumps(report)


def test_calls_of_a_server_that_reads_them_and_of_one_that_does_not() -> None:
    entry = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 7}'}}
    made = [("add", {"a": 12, "b": 7})]
    assert read_message({"content": None, "tool_calls": [entry]}) == ("", made)
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'
    assert read_message({"content": text}) == (text, made)
    assert read_message({"content": "#### 19", "tool_calls": []}) == ("#### 19", [])
    entry["function"]["arguments"] = "{"  # type: ignore[index]
    assert read_message({"content": "", "tool_calls": [entry]}) == ("", [("add", "{")])


class Down(BaseHTTPRequestHandler):
    """Names a model, and answers no question."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "down"}]})

    def do_POST(self) -> None:
        Down.asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(503, {"error": {"message": "no engine"}})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("what", ["gsm-mini", "tools-mini"])
def test_a_server_that_answers_no_question(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first error ends the run: no further request, and no output except the error."""
    Down.asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Down)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", RuntimeWarning)
            with pytest.raises(SystemExit) as ended:
                main(["eval", what, "--url", url, "--limit", "9", "--concurrency", "1"])
            gc.collect()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [str(one.message) for one in warned if one.category is RuntimeWarning] == []
    assert (ended.value.code, Down.asked) == (2, 1)
    assert "the server answered 503" in capsys.readouterr().err
