"""EleutherAI's evaluation harness: its numbers over HTTP are those of its own model class."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import run_client
from tests.smoke.server_process import serve

pytestmark = pytest.mark.clients

CHOICES = [
    ("What is the capital of France?", ["Paris", "a very long river", "seven"], 0),
    ("Which number follows six?", ["blue", "seven", "It is winter."], 1),
    ("What colour is the sky? 🙂", ["blue", "Éire", "42, or so they say"], 0),
    ("Name a season.", ["Monday", "winter", "France"], 1),
]
TEXTS = ["The sky is blue, and the river is long.", "Six and one make seven.\n\nÉire 🙂"]
CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
num_fewshot: 0
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING_TASK = """
task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


def _write_task(place: Path, task: str, rows: list[dict[str, Any]]) -> None:
    name = task.split()[1]
    data = place / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / f"{name}.yaml").write_text(task.format(data=data))


def _evaluate(clients: Path, home: Path, name: str, model: str, arguments: str) -> dict[str, Any]:
    """Run the harness; returns its results, and the answer to each of its requests."""
    out = home / name
    command = [str(clients / "lm-eval/bin/lm_eval"), "run", "--model", model, "--device", "cpu"]
    command += ["--model_args", arguments, "--batch_size", "3"]
    command += ["--tasks", "local_choice,local_text"]
    command += ["--include_path", str(home), "--output_path", str(out), "--log_samples"]
    environment = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "any", "NO_PROXY": "127.0.0.1"}
    run = run_client(command, home, environment)
    assert run.returncode == 0, run.stdout + run.stderr
    (results,) = out.rglob("results_*.json")
    samples = {
        path.name.split("_2")[0]: [
            json.loads(line)["resps"] for line in path.read_text().splitlines()
        ]
        for path in sorted(out.rglob("samples_*.jsonl"))
    }
    return {"results": json.loads(results.read_text())["results"], "samples": samples}


def _numbers(value: Any) -> list[float]:
    """All numbers in a JSON value, and truth values as numbers."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [number for item in inner for number in _numbers(item)]
    text = {"True": "1", "False": "0"}.get(value, value) if isinstance(value, str) else value
    try:
        return [float(text)]
    except (TypeError, ValueError):
        return []


def test_its_numbers_are_those_of_its_own_model(
    clients: Path, tiny_starter_dir: Path, starter_home: Path, tmp_path: Path
) -> None:
    rows = [{"question": q, "choices": choices, "answer": n} for q, choices, n in CHOICES]
    _write_task(tmp_path, CHOICE_TASK, rows)
    _write_task(tmp_path, ROLLING_TASK, [{"text": text} for text in TEXTS])
    model = str(tiny_starter_dir)
    own = _evaluate(
        clients, tmp_path, "own", "hf", f"pretrained={model},dtype=float32,max_length=256"
    )
    assert len(_numbers(own["samples"])) == 2 * 3 * len(CHOICES) + len(TEXTS)
    settings: Any = {"model": model, "backend": "torch", "dtype": "float32"}
    with serve(starter_home, tmp_path / "log", **settings) as server:
        asked = f"model={tiny_starter_dir.name},tokenizer={model},tokenizer_backend=huggingface"
        asked += f",base_url={server.url}/v1/completions,max_length=256,num_concurrent=2"
        served = _evaluate(clients, tmp_path, "served", "local-completions", asked)
    samples, results = _numbers(served["samples"]), _numbers(served["results"])
    assert samples == pytest.approx(_numbers(own["samples"]), abs=2e-3)
    assert results == pytest.approx(_numbers(own["results"]), rel=1e-3)
