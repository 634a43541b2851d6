"""Stage verify, and hits: what a disk has damaged is named, whatever kind of artifact it is in."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.artifacts import MANIFEST
from eagle3.config import Config
from eagle3.errors import RequestError, StoreError
from tests.stages import run_stage
from tests.trained import copied, make_inputs, train_config

WORDS = ("trainer.max_steps=2", "trainer.validate_every_steps=2")


@pytest.fixture(scope="module")
def made(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of artifact, made once; copy from it."""
    folder = copied(make_inputs(tiny_target), tmp_path_factory.mktemp("made"))
    for stage in ("train", "export"):
        run_stage(stage, train_config(folder, tiny_target, *WORDS))
    return folder


@pytest.fixture
def cfg(made: Path, tiny_target: Path, tmp_path: Path) -> Config:
    return train_config(copied(made, tmp_path), tiny_target, *WORDS)


def file_of(cfg: Config, name: str) -> Path:
    """The file KIND/NAME of the only artifact of its kind."""
    kind, name = name.split("/", 1)
    (path,) = Path(cfg.output_dir).glob(f"artifacts/{kind}/*/{name}")
    return path


def flip(path: Path, place: int = -7) -> None:
    """Turns one bit over, by default in the last bytes of a file, where the data is."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_all_that_was_made_is_whole(cfg: Config) -> None:
    metrics, run = run_stage("verify", cfg)
    assert metrics["artifacts"] == 4
    assert metrics["samples"] > 20
    said = re.findall(r"verify: (\w+) \S+ is whole", run.log_file.read_text())
    assert said == ["prepared", "drafter", "export", "states"]
    sizes = [p.stat().st_size for p in Path(cfg.output_dir).glob("artifacts/*/*/*") if p.is_file()]
    assert metrics["bytes"] > max(sizes)


@pytest.mark.parametrize(
    "name",
    [
        *("prepared/loss_mask.bin", "prepared/validation.npy", "prepared/offsets.npy", "drafter/drafter.safetensors"),
        *("export/model.safetensors", "export/config.json", "states/shard-00000/final.safetensors"),
    ],
)
def test_a_flipped_bit_is_named(name: str, cfg: Config) -> None:
    path = file_of(cfg, name)
    flip(path)
    with pytest.raises(
        StoreError, match=rf"^{path}: (is damaged: found crc32|has damaged rows).*; delete .*`eagle3 st"
    ):
        run_stage("verify", cfg)


@pytest.mark.parametrize("spoil", [lambda path: flip(path, 2000), lambda path: os.truncate(path, 3000)])
def test_a_damaged_checkpoint_is_named(spoil: Callable[[Path], None], cfg: Config) -> None:
    path = file_of(cfg, "drafter/checkpoints/*/state.pt")
    spoil(path)
    with pytest.raises(StoreError, match=rf"^{path}: is damaged \(.*\); delete {path.parent}, which only trainer\.res"):
        run_stage("verify", cfg)
    shutil.rmtree(path.parent)
    run_stage("verify", cfg)


def test_every_fault_is_listed(cfg: Config) -> None:
    flipped = [file_of(cfg, name) for name in ("prepared/loss_mask.bin", "export/model.safetensors")]
    for path in flipped:
        flip(path)
    cut = file_of(cfg, "drafter/drafter.safetensors")
    os.truncate(cut, 1000)
    with pytest.raises(StoreError, match=r"\(3 faults in all, listed in run\.log\)$"):
        run_stage("verify", cfg)
    (log,) = Path(cfg.output_dir).glob("runs/*/*-verify-*/run.log")
    said = [line.split("verify: ")[1] for line in log.read_text().splitlines() if " ERROR " in line]
    assert said[0].startswith(f"{flipped[0]}: is damaged")
    assert said[1].startswith(f"{cut}: found 1000 bytes")
    # The export is found through its drafter, which is named once; the states are read along their prepared set.
    assert said[2].endswith("or name it with inputs.prepared")


@pytest.mark.parametrize("kind", ["prepared", "drafter", "export", "states"])
def test_a_torn_manifest_is_a_fault_and_not_an_artifact_that_was_not_made(kind: str, cfg: Config) -> None:
    path = file_of(cfg, f"{kind}/{MANIFEST}")
    os.truncate(path, 200)
    with pytest.raises(StoreError, match=rf"^{path}: cannot be read .*; delete {path.parent}"):
        run_stage("verify", cfg)


def test_a_folder_that_lost_its_manifest_is_a_fault(cfg: Config) -> None:
    path = file_of(cfg, f"export/{MANIFEST}")
    path.unlink()
    with pytest.raises(StoreError, match=rf"found a folder without a manifest at {path.parent}"):
        run_stage("verify", cfg)


def test_states_are_used_without_the_plan_that_only_extraction_reads(cfg: Config) -> None:
    file_of(cfg, "states/plan.json").unlink()
    assert run_stage("verify", cfg)[0]["artifacts"] == 4
    run_stage("export", cfg)


def test_what_is_named_may_lie_elsewhere(cfg: Config, tmp_path: Path) -> None:
    folder = file_of(cfg, f"states/{MANIFEST}").parent
    cfg.inputs.states, cfg.inputs.prepared = str(folder), str(file_of(cfg, f"prepared/{MANIFEST}").parent)
    cfg.output_dir = str(tmp_path / "none-yet")
    assert run_stage("verify", cfg)[0]["samples"] > 20


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("prepare", "prepared/input_ids.bin"),
        ("extract", "prepared/input_ids.bin"),
        ("train", "prepared/token_counts.npy"),
        ("train", "drafter/drafter.safetensors"),
        ("export", "drafter/drafter.safetensors"),
        ("export", "export/model.safetensors"),
        ("evaluate", "export/model.safetensors"),
        ("verify", "export/model.safetensors"),
    ],
)
def test_a_file_that_was_cut_short_is_no_hit(stage: str, name: str, cfg: Config) -> None:
    """It was one, and the stage behind it asked to run the stage again, for ever."""
    path = file_of(cfg, name)
    size = path.stat().st_size
    os.truncate(path, size - 20)
    made_by = {"drafter": "train"}.get(name.split("/")[0], name.split("/")[0].removesuffix("d"))
    words = rf"^{path}: found {size - 20} bytes, expected {size}; delete {path.parent} and run `eagle3 stage={made_by}`"
    with pytest.raises(StoreError, match=words):
        run_stage(stage, cfg)
    if stage == "prepare":
        shutil.rmtree(path.parent)
        run_stage("prepare", cfg)
        assert path.stat().st_size == size


def test_what_is_not_made_is_left_out_and_what_is_named_must_be_there(cfg: Config) -> None:
    shutil.rmtree(file_of(cfg, "export/config.json").parent)
    metrics, run = run_stage("verify", cfg)
    assert metrics["artifacts"] == 3
    assert "verify: no export to check" in run.log_file.read_text()
    cfg.inputs.export = "none-such"
    with pytest.raises(RequestError, match=r"^inputs\.export=none-such: found nothing"):
        run_stage("verify", cfg)
    shutil.rmtree(Path(cfg.output_dir) / "artifacts")
    cfg.inputs.export = None
    with pytest.raises(RequestError, match=r"^prepared: found nothing at .*run `eagle3 stage=prepare`"):
        run_stage("verify", cfg)


def test_artifacts_of_an_earlier_version_stay_valid(cfg: Config) -> None:
    for path in Path(cfg.output_dir).glob(f"artifacts/*/*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        manifest.pop("files")
        path.write_text(json.dumps(manifest))
    for stage in ("prepare", "extract", "train", "export"):
        run_stage(stage, cfg)
    metrics, run = run_stage("verify", cfg)
    assert metrics["artifacts"] == 4
    assert len(re.findall(r"verify: \w+ \S+ has no checksums", run.log_file.read_text())) == 3
    offsets = file_of(cfg, "prepared/offsets.npy")
    flip(offsets)
    with pytest.raises(
        StoreError, match=r"is no whole prepared artifact \(.*\); delete the folder and run `eagle3 sta"
    ):
        run_stage("verify", cfg)


def test_an_output_folder_that_cannot_be_written_can_be_checked(cfg: Config) -> None:
    runs = Path(cfg.output_dir) / "runs"
    shutil.rmtree(runs)
    runs.touch()
    metrics, run = run_stage("verify", cfg)
    assert metrics["artifacts"] == 4
    assert run.folder.name.startswith("eagle3-verify-")
    shutil.rmtree(run.folder)
