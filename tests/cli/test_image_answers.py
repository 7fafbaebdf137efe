"""``weft eval ocr-mini``: requests to a server, answers of the reference, and the report."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weft.cli.evaluate.evaluate import line_report
from weft.cli.main import main
from weft.eval.ocr_mini import Line, data_url, ocr_test_set


class Seer(BaseHTTPRequestHandler):
    """Answer a chat with the text of its image, except for the first line of the test set."""

    known: dict[str, Line]

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "seer"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["model"], body["temperature"]) == ("seer", 0)
        image, text = body["messages"][0]["content"]
        line = self.known[image["image_url"]["url"]]
        assert text["text"] == line.prompt
        content = "no idea" if line == ocr_test_set(1)[0] else line.text
        self._answer({"choices": [{"message": {"content": content}}]})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_server_is_sent_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Seer.known = {data_url(line): line for line in ocr_test_set(6)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Seer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    file = tmp_path / "report.json"
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(SystemExit) as ended:
            main(["eval", "ocr-mini", "--url", url, "--limit", "6", "--json", str(file)])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ocr-mini: 5 / 6 exact (83.3%), ")
    report = json.loads(file.read_text())
    assert (report["task"], report["target"], report["exact"], report["total"]) == ("ocr-mini", "seer", 5, 6)
    assert [row["right"] for row in report["problems"]] == [False] + [True] * 5


def test_the_reference_reads_with_its_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A random model reads nothing, but the same whether the processor or the training makes the patches."""
    pytest.importorskip("transformers", reason="needs the transformers package")
    import torch

    from training.ocr import Rows, read_lines
    from training.spool_vision import IMAGE_TOKENS, SpoolVision

    script = SpoolVision()
    tokenizer = script.tokenizer(tmp_path)
    torch.manual_seed(0)
    model = script.new_model(tokenizer).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)  # otherwise the output would not depend on the image
    folder = tmp_path / "checkpoint"
    script.export(model, tokenizer, folder)
    loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    file = tmp_path / "report.json"
    flags = ["--reference", "--limit", "4", "--dtype", "float32", "--max-tokens", "12", "--json", str(file)]
    with pytest.raises(SystemExit) as ended:
        main(["eval", "ocr-mini", str(folder), *flags])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ocr-mini: 0 / 4 exact")
    texts = [row["text"] for row in json.loads(file.read_text())["problems"]]
    assert texts == read_lines(loaded, Rows(tokenizer, IMAGE_TOKENS), ocr_test_set(4))
    assert len(set(texts)) > 1


def test_a_report_of_lines() -> None:
    lines = ocr_test_set(2)
    report = line_report(lines, [lines[0].text, "?"], "some model")
    assert (report["exact"], report["accuracy"]) == (1, 0.5)
    assert report["problems"][1] == {
        "prompt": lines[1].prompt,
        "expected": lines[1].text,
        "text": "?",
        "right": False,
    }
