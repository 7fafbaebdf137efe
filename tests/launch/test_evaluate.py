"""``weft eval``: one score whether Weft or the reference answers, and what the report holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.eval.gsm_mini import test_set as problem_set
from weft.launch.evaluate import score
from weft.launch.main import main


def test_scores_count_exact_answers() -> None:
    problems = problem_set(4)
    texts = [problems[0].solution, f"#### {problems[1].answer + 1}", "no idea", problems[3].solution]
    report = score(problems, texts, "some model", 1.26)
    assert (report["exact"], report["total"], report["accuracy"]) == (2, 4, 0.5)
    assert (report["task"], report["target"], report["seconds"]) == ("gsm-mini", "some model", 1.3)
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
