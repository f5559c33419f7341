"""The commands as processes: from a target's directory to a draft that resumes after Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from draft_worker.eagle.network import EagleConfig, EagleNetwork
from splitspec.engine.weights import weights_hash
from splitspec.vocabulary import Vocabulary
from tests.training import tiny_target
from tests.training.conftest import Tiny


def _splitspec(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from splitspec.cli import main; main()", "train", *map(str, arguments)]


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_splitspec(*arguments), capture_output=True, text=True, timeout=240)


def _eagle(tiny: Tiny, out: Path, tokens: int, model: Path | None = None) -> list[object]:
    wanted = ["--model", model or tiny.directory, "--data", tiny.data, "--out", out, "--tokens", tokens]
    return ["eagle", *wanted, "--tokens-per-batch", 256, "--draft-vocabulary", 64, "--max-length", 64]


def _tokens(out: Path) -> int:
    lines = (out / "log.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["tokens"])


def test_eagle_training_stops_at_ctrl_c_and_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    running = subprocess.Popen(_splitspec(*_eagle(tiny, out, 10**9)), stderr=subprocess.DEVNULL)
    while not (out / "log.jsonl").exists():
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=120) == 0
    stopped = _tokens(out)
    done = _run(*_eagle(tiny, out, stopped + 1000))
    assert done.returncode == 0, done.stderr
    assert _tokens(out) >= stopped + 1000
    config = EagleConfig.load(out)
    EagleNetwork.load(out, config)
    config.check_target("tiny", weights_hash(tiny.directory), Vocabulary.load(tiny.directory).hash)
    drawn = _run("curve", out)
    assert drawn.stdout.strip() == str(out / "curve.png")
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")

    other = tiny_target.target(tmp_path / "other", seed=1)
    refused = _run(*_eagle(tiny, out, 10**9, model=other))
    assert refused.returncode == 1
    assert "weights hash" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_data_and_distill(tiny: Tiny, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "draft"
    wrote = _run(
        "data",
        "--model",
        tiny.directory,
        "--out",
        data,
        "--examples",
        80,
        "--dtype",
        "float32",
        "--max-prompt-tokens",
        6,
        "--max-answer-tokens",
        8,
    )
    assert wrote.returncode == 0, wrote.stderr
    assert "examples: 80 of 80" in wrote.stderr
    assert len(data.read_text().splitlines()) == 80
    trained = _run(
        "distill",
        "--model",
        tiny.directory,
        "--data",
        data,
        "--out",
        out,
        "--layers",
        "0+3",
        "--tokens",
        200,
        "--tokens-per-batch",
        256,
    )
    assert trained.returncode == 0, trained.stderr
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2


def test_a_wrong_flag_is_one_sentence(tiny: Tiny, tmp_path: Path) -> None:
    wanted = ["--model", tiny.directory, "--data", tiny.data, "--out", tmp_path, "--layers", "0,1"]
    done = _run("distill", *wanted)
    assert done.returncode == 2
    assert "layers is '0,1', expected layers such as" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
