"""lm-eval's API models on two small tasks of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running
from weft.config.hub import BUNDLED

pytestmark = pytest.mark.clients

QUESTIONS = [
    ("Tom has 12 apples and buys 7 more. How many apples does he have?", "19"),
    ("Ann has 5 pens and gives away 2. How many pens does she have?", "3"),
    ("A box holds 6 balls. How many balls do 4 boxes hold?", "24"),
]
CHOICES = [("Tom has 12 apples and buys 7 more. How many", " apples", " zzzz"), ("1 2 3 4 5 6", " 7", " qx")]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-clients")
    pytest.importorskip("tenacity", reason="lm-eval's extra [api] is not installed: make test-clients")
    return lm_eval.simple_evaluate


def task(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A task of ``rows``, from a file."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        **fields,
    }


def arguments(server: Running, route: str, **more: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "base_url": f"{server.url}/v1/{route}",
        "num_concurrent": 2,
        "max_retries": 1,
        **more,
    }


@pytest.mark.requirement("F67")
def test_likelihoods_of_choices(bundled: Running, evaluate: Any, tmp_path: Path) -> None:
    made = task(
        tmp_path,
        [{"text": text, "choices": [right, wrong]} for text, right, wrong in CHOICES],
        task="weft_choices",
        output_type="multiple_choice",
        doc_to_text="{{text}}",
        doc_to_choice="{{choices}}",
        doc_to_target=0,
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    model = arguments(
        bundled, "completions", tokenizer=str(BUNDLED / "spool-text"), tokenizer_backend="huggingface"
    )
    got = evaluate(model="local-completions", model_args=model, tasks=[made], bootstrap_iters=0)
    assert got["results"]["weft_choices"]["acc,none"] == 1.0
    assert len(got["samples"]["weft_choices"]) == len(CHOICES)


def test_chats(bundled: Running, evaluate: Any, tmp_path: Path) -> None:
    made = task(
        tmp_path,
        [{"question": question, "answer": answer} for question, answer in QUESTIONS],
        task="weft_sums",
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"max_gen_toks": 128, "temperature": 0, "until": ["<never>"]},
        filter_list=[
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        metric_list=[{"metric": "exact_match"}],
    )
    got = evaluate(
        model="local-chat-completions",
        model_args=arguments(bundled, "chat/completions"),
        tasks=[made],
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert got["results"]["weft_sums"]["exact_match,number"] >= 2 / 3
