"""The report: right numbers, one file that needs no network, and a page that a browser draws."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from eagle3.config import Config, ModelConfig, ReportConfig, StageConfig
from eagle3.errors import RequestError
from eagle3.findings import half_width, over_prompts, read_findings
from eagle3.records import Record
from eagle3.report import write_report
from eagle3.runs import Run
from eagle3.stages import report as report_stage

LAYERS = {"eagle": [2, 15, 27], "late": [18, 23, 27]}
# Acceptance lengths by seed.
LENGTHS = {"eagle": [1.30, 1.34, 1.32], "late": [1.20, 1.25, 1.21]}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_job(root: Path, name: str, layers: str, length: float | None, **result: Any) -> None:
    """A finished pipeline job with its drafter; `length` None means that nothing was decoded."""
    folder = root / "sweeps" / "5eed" / name
    drafter, states = (root / "artifacts" / kind / f"{kind[0]}-{name}" for kind in ("drafter", "states"))
    ids = LAYERS[layers]
    write_json(drafter / "manifest.json", {"layer_ids": ids, "made_from": [f"states/{states.name}"]})
    (drafter / "drafter.safetensors").write_bytes(b"x" * 2000)
    write_json(states / "manifest.json", {"made_from": []})
    for file in [*(f"layer-{i:03d}.safetensors" for i in (*ids, 30)), "final.safetensors"]:
        (states / "shard-00000").mkdir(exist_ok=True)
        (states / "shard-00000" / file).write_bytes(b"x" * 1000)
    validation = {"accuracy_conditional/step_0": 0.4, "accuracy_conditional/step_1": 0.3}
    train = {"loss": 9.5, "tokens_per_s": 1148.2, "simulated_acceptance_length": 1.4, "validation": validation}
    metrics: dict[str, Any] = {"train": train}
    if length is not None:
        evaluation = {"acceptance_length": length, "k": 2, "temperature": 0.0, "per_position": [0.3, 0.2]}
        metrics["evaluate"] = {**evaluation, "baselines": {"untrained": 1.01, "bigram": 1.18}}
    write_json(
        folder / "result.json", {"status": "done", "exit_code": 0, "seconds": 62.0, "metrics": metrics, **result}
    )
    entries = [{"kind": path.parent.name, "id": path.name, "folder": str(path)} for path in (states, drafter)]
    facts = {"model": "tiny", "stage": "pipeline", "started": "2026-01-01T10:00:00", "versions": {"eagle3": "0.1.0"}}
    facts |= {"seconds_of": {"train": 50.0, "evaluate": 12.0}}
    write_json(folder / "provenance.json", {**facts, "artifacts": {"read": entries[:1], "wrote": entries[1:]}})
    lines = [{"step": step, "train/loss": 20 - step} for step in (1, 2, 3)]
    lines += [{"step": 3, "validation/loss": 15.0, "validation/simulated_acceptance_length/k_1": 1.3}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "tra')
    (folder / "config.yaml").write_text(f"seed: 0\nlayers:\n  name: {layers}\n")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two selections with three seeds, and a job that failed."""
    index = {}
    for layers, lengths in LENGTHS.items():
        for seed, length in enumerate(lengths):
            name = f"layers={layers}-seed={seed}"
            index[name] = ["+experiment=demo", f"layers={layers}", f"seed={seed}"]
            write_job(tmp_path, name, layers, length)
    index["layers=spread-seed=0"] = ["+experiment=demo", "layers=spread", "seed=0"]
    folder = tmp_path / "sweeps" / "5eed"
    failure = {"status": "failed", "exit_code": 1, "error": "train failed: <b>no & memory</b>", "metrics": {}}
    write_json(folder / "layers=spread-seed=0" / "result.json", failure)
    write_json(folder / "index.json", index)
    return folder


def test_seeds_are_the_spread_of_a_selection(sweep: Path) -> None:
    found = read_findings(sweep)
    assert [selection.label for selection in found.selections] == ["eagle", "late", "spread"]
    best, second, failed = found.selections
    assert best.mean == pytest.approx(1.32)
    assert best.layer_ids == [2, 15, 27]
    # Student's t with two degrees of freedom: 4.303.
    assert half_width(best.values) == pytest.approx(4.303 * 0.02 / math.sqrt(3))
    assert (second.mean, failed.mean) == (pytest.approx(1.22), None)
    assert best.positions() == (pytest.approx([0.3, 0.2]), True)


def test_the_verdict_compares_seed_by_seed(sweep: Path) -> None:
    pairs = [a - b for a, b in zip(*LENGTHS.values(), strict=True)]
    uncertainty = 4.303 * statistics.stdev(pairs) / math.sqrt(3)
    lines = read_findings(sweep).verdict()
    assert lines[0] == "Use eagle, layers [2, 15, 27]: acceptance length 1.320 ± 0.050 (95 %, 3 seeds)."
    assert lines[1] == f"It is 0.100 ± {uncertainty:.3f} ahead of late: a difference."
    assert len(lines) == 2


def with_prompts(folder: Path, accepted: dict[str, list[int]], k: int = 3) -> None:
    """Adds what an evaluation by our decoder leaves: the accepted drafts of each round of each prompt."""
    records = [
        {"set": "s", "key": key, "looping": key == "loops", "accepted_by_round": rounds}
        for key, rounds in accepted.items()
    ]
    write_json(folder / "evaluation.json", {"records": records})
    kept = [count for key, rounds in accepted.items() if key != "loops" for count in rounds]
    result = json.loads((folder / "result.json").read_text())
    rate = sum(kept) / len(kept)
    facts = {"acceptance_length": 1 + rate, "accepted_drafts": rate, "rounds": len(kept), "k": k, "temperature": 0.0}
    result["metrics"]["evaluate"] |= facts
    write_json(folder / "result.json", result)


def random_prompts(seed: int, prompts: int, rounds: int, rate: float, easy: np.ndarray) -> dict[str, list[int]]:
    """Rounds of prompts that are easy or hard for every drafter alike."""
    random = np.random.default_rng(seed)
    chances = np.clip(rate + easy[:prompts], 0, 1)
    return {f"p{i}": random.binomial(3, chance, rounds).tolist() for i, chance in enumerate(chances)}


def test_other_prompts_are_a_part_of_the_uncertainty(sweep: Path) -> None:
    """The interval of a ratio over prompts, against the bootstrap over prompts; pairs share what is easy."""
    easy = np.random.default_rng(7).normal(0, 0.12, 40)
    found: dict[str, list[dict[str, list[int]]]] = {}
    for layers, rate in (("eagle", 0.45), ("late", 0.35)):
        for seed in range(3):
            prompts = random_prompts(seed, 40, 30, rate, easy)
            with_prompts(sweep / f"layers={layers}-seed={seed}", {**prompts, "loops": [3] * 30})
            found.setdefault(layers, []).append(prompts)

    def length(jobs: list[dict[str, list[int]]], keys: list[str]) -> float:
        return statistics.fmean(1 + sum(sum(job[k]) for k in keys) / sum(len(job[k]) for k in keys) for job in jobs)

    random = np.random.default_rng(0)
    draws = [[f"p{i}" for i in random.integers(0, 40, 40)] for _ in range(600)]
    alone = 1.96 * statistics.stdev(length(found["eagle"], keys) for keys in draws)
    apart = 1.96 * statistics.stdev(length(found["eagle"], keys) - length(found["late"], keys) for keys in draws)
    findings = read_findings(sweep)
    best, second = findings.selections[:2]
    assert best.basis == "3 seeds, 40 prompts, 3,600 rounds"
    assert over_prompts(best.pulls.values(), None) == pytest.approx(alone, rel=0.12)
    pulls = [pull - second.pulls[key] for key, pull in best.pulls.items()]
    assert over_prompts(pulls, None) == pytest.approx(apart, rel=0.12)
    assert apart < alone, "what is easy is easy for both, so that the difference is surer than either"
    seeds = half_width(best.values)
    assert best.spread == pytest.approx(math.hypot(seeds or 0.0, over_prompts(best.pulls.values(), None) or 0.0))


def test_few_prompts_that_agree_prove_nothing(sweep: Path) -> None:
    """Two prompts with one accepted draft in all, each seed alike: an interval of nothing would be a lie."""
    for layers, accepted in (("eagle", 1), ("late", 0)):
        for seed in range(3):
            rounds = [accepted] + [0] * 14
            with_prompts(sweep / f"layers={layers}-seed={seed}", {"a": rounds, "b": rounds})
    findings = read_findings(sweep)
    best, second = findings.selections[:2]
    assert best.spread == pytest.approx(1.96 * math.sqrt(6 + 1) / 90)
    assert second.spread == pytest.approx(1.96 * math.sqrt(0 + 1) / 90)
    lines = findings.verdict()
    assert lines[1] == "That is no better than the bigram drafter, 1.180: train longer."
    assert lines[2].endswith("ahead of late: a difference.")
    with_prompts(sweep / "layers=late-seed=0", {"a": [1] + [0] * 14, "b": [1] * 2 + [0] * 13})
    assert read_findings(sweep).verdict()[2].endswith("ahead of late: no clear difference.")


def test_one_seed_promises_nothing(tmp_path: Path) -> None:
    index = {f"layers={name}": [f"layers={name}"] for name in LAYERS}
    for name in LAYERS:
        write_job(tmp_path, f"layers={name}", name, None)
    folder = tmp_path / "sweeps" / "5eed"
    write_json(folder / "index.json", index)
    lines = read_findings(folder).verdict()
    assert lines[0].endswith("simulated acceptance length 1.400 (one seed).")
    assert "One seed cannot tell a difference from luck: add seed=0,1,2 to the sweep." in lines
    assert any("Nothing was decoded" in line for line in lines)
    assert half_width([1.0]) is None


def test_a_wide_interval_is_a_wide_interval() -> None:
    """Beyond the table, too: t(0.975, 10) = 2.2281, and for 11, 20 and 100 degrees 2.2010, 2.0860, 1.9840."""
    for count, quantile in ((11, 2.2281), (12, 2.2010), (21, 2.0860), (101, 1.9840)):
        values = [float(i % 2) for i in range(count)]
        expected = quantile * statistics.stdev(values) / math.sqrt(count)
        assert half_width(values) == pytest.approx(expected, rel=1e-3)


def test_a_search_names_its_points_by_all_that_it_varies(tmp_path: Path) -> None:
    index = {f"p{i}": ["stage=train", "layers=late", f"trainer.lr={lr}"] for i, lr in enumerate((1.23456e-4, 2e-3))}
    for name in index:
        write_job(tmp_path, name, "late", 1.5)
    folder = tmp_path / "sweeps" / "5eed"
    write_json(folder / "index.json", {**index, "p2": ["stage=train", "layers=eagle", "trainer.lr=2e-3"]})
    findings = read_findings(folder)
    labels = [selection.label for selection in findings.selections]
    assert findings.numbers() == {}, "two numbers make no curve"
    write_job(tmp_path, "p3", "late", 1.7)
    write_json(folder / "index.json", {**index, "p3": ["stage=train", "layers=late", "trainer.lr=3e-2"]})
    searched = read_findings(folder)
    assert {value: s.mean for value, s in searched.numbers()["trainer.lr"]} == {1.23456e-4: 1.5, 2e-3: 1.5, 3e-2: 1.7}
    assert "<h2>Fields</h2>" in write_report(folder).read_text()
    assert labels == [
        "layers=late trainer.lr=0.000123",
        "layers=late trainer.lr=0.002",
        "layers=eagle trainer.lr=0.002",
    ]


def test_bytes_are_those_of_the_layers_that_a_drafter_reads(sweep: Path) -> None:
    job = Record(sweep / "layers=late-seed=0")
    assert job.bytes_read() == 4 * 1000  # three layers and the final state; layer 30 is another's
    assert job.bytes_made() == 2000 + (job.artifact("drafter") or sweep).joinpath("manifest.json").stat().st_size


def test_a_resumed_job_has_the_curve_of_all_its_attempts(sweep: Path) -> None:
    job = sweep / "layers=late-seed=0"
    earlier = sweep / "layers=late-seed=0.attempt-1"
    earlier.mkdir()
    (earlier / "metrics.jsonl").write_text('{"step": 0, "train/loss": 30}\n{"step": 1, "train/loss": 25}\n')
    assert Record(job).curve("train/loss") == [(0, 30), (1, 19), (2, 18), (3, 17)]


def test_the_page_is_one_file_with_everything(sweep: Path) -> None:
    page = write_report(sweep).read_text()
    assert "Use eagle, layers [2, 15, 27]" in page
    assert "&lt;b&gt;no &amp; memory&lt;/b&gt;" in page
    assert "<b>no" not in page
    assert "Baselines: untrained 1.010, bigram 1.180." in page
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    links = re.findall(r'href="([^"]*)"', page)
    assert "layers=eagle-seed=0/" in links
    assert all((sweep / link).exists() for link in links if not link.endswith(".log"))
    pictures = {path.stem for path in (sweep / "report").glob("*.png")}
    assert pictures == {"acceptance", "layers", "positions", "losses", "costs"}
    for picture in (sweep / "report").glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) > 200
    # The same results give the same page.
    assert write_report(sweep).read_text() == page


def test_a_sweep_without_results_has_a_page_too(tmp_path: Path) -> None:
    write_json(tmp_path / "index.json", {"a": ["seed=0"], "b": ["seed=1"]})
    page = write_report(tmp_path).read_text()
    assert "No job has measured an acceptance length yet." in page
    assert "2 jobs: 2 waiting" in page


def test_layers_by_number_are_not_called_by_the_name_of_a_preset(sweep: Path) -> None:
    folder = sweep / "layers=late-seed=1"
    assert "late [18, 23, 27]" in write_report(folder).read_text()
    (folder / "config.yaml").write_text("seed: 0\nlayers:\n  name: late\n  ids: [18, 23, 27]\n")
    page = write_report(folder).read_text()
    assert "late [18, 23, 27]" not in page
    assert "<td>[18, 23, 27]</td>" in page


def test_a_run_has_its_curves_and_its_walk(sweep: Path) -> None:
    folder = sweep / "layers=late-seed=1"
    page = write_report(folder).read_text()
    for title in ("Simulated acceptance length", "Positions", "Loss", "Time and bytes", "Walk"):
        assert f"<h2>{title}</h2>" in page
    assert "drafter/d-layers=late-seed=1" in page
    assert "states/s-layers=late-seed=1" in page
    (walk,) = re.findall(r'href="([^"]*drafter/d-[^"]*)"', page)
    assert (folder / walk).is_dir()


def test_stage_report_takes_the_newest_sweep_or_what_it_is_told(sweep: Path, tmp_path: Path) -> None:
    cfg = Config(stage=StageConfig("report"), model=ModelConfig(name="tiny"), output_dir=str(tmp_path))
    run = Run.start(cfg, [])
    assert report_stage.run(cfg, run) == {"page": str(sweep / "report.html")}
    cfg.report = ReportConfig(folder=str(sweep / "layers=late-seed=1"))
    assert report_stage.run(cfg, run)["page"].endswith("layers=late-seed=1/report.html")
    cfg.report = ReportConfig(folder=str(tmp_path))
    with pytest.raises(RequestError, match=r"report\.folder: .* holds neither index\.json of a sweep"):
        report_stage.run(cfg, run)
    run.finish("done", 0)


def test_stage_report_says_when_there_is_nothing(tmp_path: Path) -> None:
    cfg = Config(stage=StageConfig("report"), model=ModelConfig(name="tiny"), output_dir=str(tmp_path))
    run = Run.start(cfg, [])
    (run.folder.parent / "somebody's notes").mkdir()
    with pytest.raises(RequestError, match="holds no sweep and no run"):
        report_stage.run(cfg, run)
    run.finish("refused", 2)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian's package `chromium`)")
def test_a_browser_draws_it_from_the_file_without_a_network(sweep: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1000,2600"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * 127.0.0.1:9"]
    command = [str(BROWSER), *flags, f"--screenshot={picture}", write_report(sweep).as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (2600, 1000, 3)
    # Eagle's and late's colours in the pictures, and the verdict's box above them.
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (np.abs(pixels[300:].astype(int) - colour).sum(axis=2) < 12).sum() > 300
    assert (pixels[:300] == (0xEE, 0xF5, 0xFB)).all(axis=2).sum() > 10_000
