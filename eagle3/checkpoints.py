"""Checkpoints of a training run: complete or absent, loadable without running code, and enough to go on bit for bit.

Beside the walk: `training` is saved here while it runs, into `<drafter artifact>.partial/checkpoints/`. A checkpoint is
a folder `step-00000200/` with Lightning's state (weights, moments, schedule, counters, callbacks) and a manifest; it is
written under another name, fsynced, its manifest last, and renamed. The oldest go only after a newer one is complete.
The drafter of the best validation so far lies beside them, so that the artifact can hold the best, not just the last.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from eagle3.artifacts import fsync_folder, write_json
from eagle3.disk_room import check_room, writing
from eagle3.drafter import WEIGHTS, drafter_tensors, save_drafter
from eagle3.errors import RequestError, StoreError

STATE, MANIFEST = "state.pt", "manifest.json"
# What `training` puts into every checkpoint; one without it is of an earlier version.
KEPT = ("oov_memory",)
# fp32 weights and AdamW's two moments; measured 12.02 with all that Lightning adds (8.6M weights).
BYTES_PER_WEIGHT = 12
ADVICE = (
    "make room (`eagle3 stage=gc` lists what can go), keep fewer checkpoints (trainer.keep_checkpoints) or set "
    "output_dir= to another disk"
)
log = logging.getLogger("eagle3")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    manifest: dict[str, Any]


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a folder, oldest first; what is unfinished or damaged is named in the log."""
    found = []
    for path in sorted(folder.glob("step-*")):
        if not re.fullmatch(r"step-\d+", path.name):
            log.warning("%s: an unfinished checkpoint, ignored", path)
            continue
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            size = (path / STATE).stat().st_size
            if size != manifest["size_bytes"]:
                raise ValueError(f"{STATE} has {size} bytes, expected {manifest['size_bytes']}")
            found.append(Checkpoint(path, int(manifest["step"]), manifest))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: a damaged checkpoint, ignored (%s)", path, error)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def check_checkpoint_room(folder: Path, weights: int, keep: int, coming: int) -> None:
    """RequestError when the disk has no room for what training will write into `folder`: the checkpoints kept, of
    `weights` trained weights each, one more while it is written, `coming` in all, and two drafters.

    What is there already counts as written.
    """
    there = len(list(folder.glob(f"step-*/{STATE}")))
    checkpoints = max(min(keep + 1, there + coming) - there, 0)
    needed = weights * (BYTES_PER_WEIGHT * checkpoints + 2 * torch.float32.itemsize)
    check_room(folder, needed, f"training, with {checkpoints} checkpoints at once,", ADVICE)


def checkpoint_to_resume(folder: Path, where: str) -> Checkpoint:
    """The newest complete checkpoint of a folder of checkpoints or of a drafter artifact, or the folder itself.

    RequestError, naming `where` and the steps that are there, when it is none.
    """
    if (folder / MANIFEST).is_file() and (folder / STATE).is_file():
        folder, wanted = folder.parent, folder.name
        for checkpoint in complete_checkpoints(folder):
            if checkpoint.folder.name == wanted:
                return checkpoint
    inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    checkpoints = complete_checkpoints(inner) if inner.is_dir() else []
    if not checkpoints:
        found = "no complete checkpoint" if folder.is_dir() else "no such folder"
        steps = sorted(path.name for path in inner.glob("step-*")) if inner.is_dir() else []
        raise RequestError(
            f"{where}: found {found} at {folder} (in it: {steps or 'nothing'}), expected a drafter artifact with "
            "checkpoints; `eagle3 stage=runs` lists them"
        )
    return checkpoints[-1]


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint folder that is complete once it has its name; reads with weights-only loading."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes `path`, a folder that does not exist yet. What is left of an earlier attempt goes."""
        folder = Path(path)
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        with writing(folder.parent, f"checkpoint {folder.name}", ADVICE):
            temporary.mkdir(parents=True)
            with open(temporary / STATE, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            manifest = {"step": checkpoint["global_step"], "size_bytes": (temporary / STATE).stat().st_size}
            write_json(temporary / MANIFEST, {**manifest, **(storage_options or {})})
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
        fsync_folder(folder.parent)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's state. StoreError when the file is torn, holds anything but plain values and tensors, or was
        written by an earlier version, with which no run can go on bit for bit."""
        try:
            state = torch.load(Path(path) / STATE, map_location=map_location or "cpu", weights_only=True)
        except Exception as error:
            raise StoreError(
                f"{Path(path) / STATE}: cannot be read ({type(error).__name__}: {error}); delete {path} to go on from "
                "the checkpoint before it"
            ) from error
        if missing := [name for name in KEPT if name not in state]:
            drafter = Path(path).parent.parent
            weights = (drafter / WEIGHTS).is_file()
            raise StoreError(
                f"{Path(path) / STATE}: found no {', '.join(missing)}, expected a checkpoint of this eagle3 version, "
                "not of an earlier one; start afresh with trainer.resume=false and without trainer.resume_from"
                + (f", or from its weights with drafter.warm_start={drafter}" if weights else "")
            )
        return state

    def remove_checkpoint(self, path: Any) -> None:
        """Removes it whole: first its name as a complete one, then the rest."""
        folder = Path(path)
        going = folder.with_name(folder.name + ".old")
        os.rename(folder, going)
        shutil.rmtree(going)


class Checkpoints(Callback):
    """Saves every `every` optimizer steps and at the last one, and the drafter whenever validation finds it better.

    Better is a longer simulated acceptance length; of equals the later one. `tokens` and `loss` are what training has
    seen and the last that it reported.
    """

    def __init__(self, folder: Path, every: int, keep: int, accumulate: int, validate_every: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep
        self.accumulate, self.validate_every = accumulate, validate_every
        self.best: dict[str, Any] | None = None
        self._longer = False
        self.tokens = 0
        self.loss: float | None = None

    @property
    def best_folder(self) -> Path | None:
        """The folder with the drafter of the best validation so far."""
        return None if self.best is None else self.folder / f"best-{self.best['step']:08d}"

    def train_longer(self, best: dict[str, Any] | None, weights: Path, rank: int) -> None:
        """Before the checkpoint of a shorter run is loaded: its `best`, whose weights rank 0 copies, is the first here.

        None where its score was another measure: then the first validation of this run is the best so far.
        """
        self._longer, self.best = True, best
        if best is not None and rank == 0:
            self._place_best(lambda folder: Path(shutil.copy(weights, folder)))

    def state_dict(self) -> dict[str, Any]:
        """Goes into the checkpoint: the best so far, the tokens so far, the random generators."""
        state: dict[str, Any] = {"best": self.best, "tokens": self.tokens, "loss": self.loss}
        state["random"] = torch.get_rng_state()
        if torch.cuda.is_available():
            state["random_cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up where the checkpoint was written."""
        self.tokens, self.loss = state_dict["tokens"], state_dict["loss"]
        if not self._longer:
            self.best = state_dict["best"]
        torch.set_rng_state(state_dict["random"])
        if torch.cuda.is_available() and "random_cuda" in state_dict:
            torch.cuda.set_rng_state_all(state_dict["random_cuda"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves where no validation follows that the checkpoint should know about."""
        self.tokens += batch.tokens * trainer.world_size  # all ranks have like loads
        step = trainer.global_step
        last = batch_idx + 1 == trainer.num_training_batches
        if (batch_idx + 1) % self.accumulate and not last:
            return
        if last and trainer.enable_validation:
            # Makes Lightning validate here, wherever the last step falls.
            trainer.should_stop = True
        elif not (trainer.enable_validation and step % self.validate_every == 0) and (step % self.every == 0 or last):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the drafter when it is the best so far, then saves if a checkpoint is due."""
        step, metrics = trainer.global_step, dict(getattr(pl_module, "validation"))  # noqa: B009
        score = metrics["simulated_acceptance_length"]
        if self.best is None or score >= self.best["score"]:
            self.best = {"step": step, "score": score, "metrics": metrics}
            drafter = getattr(pl_module, "drafter")  # noqa: B009
            tensors = drafter_tensors(drafter)  # on every rank, each may hold a part
            if trainer.is_global_zero:
                self._place_best(lambda folder: save_drafter(drafter, folder, tensors))
        if step % self.every == 0 or trainer.should_stop:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves a checkpoint of now, then removes what it makes superfluous."""
        path = self.folder / f"step-{trainer.global_step:08d}"
        trainer.save_checkpoint(path, storage_options={"accumulate": self.accumulate, "best": self.best})
        if not trainer.is_global_zero:
            return
        log.debug("train: checkpoint %s", path)
        for rest in self.folder.glob("step-*.*"):
            # What a killed run was writing or removing.
            shutil.rmtree(rest)
        for old in complete_checkpoints(self.folder)[: -self.keep]:
            AtomicCheckpointIO().remove_checkpoint(old.folder)
        needed = {self.best_folder} | {self._best_of(c) for c in complete_checkpoints(self.folder)}
        for old in self.folder.glob("best-*"):
            if old not in needed:
                shutil.rmtree(old)

    def drop_all_but_last(self) -> None:
        """Leaves what longer training needs: the last checkpoint."""
        for old in complete_checkpoints(self.folder)[:-1]:
            AtomicCheckpointIO().remove_checkpoint(old.folder)
        for rest in [*self.folder.glob("best-*"), *self.folder.glob("step-*.*")]:
            shutil.rmtree(rest)

    def _best_of(self, checkpoint: Checkpoint) -> Path | None:
        best = checkpoint.manifest.get("best")
        return None if best is None else self.folder / f"best-{best['step']:08d}"

    def _place_best(self, write: Callable[[Path], Path]) -> None:
        """Fills the best drafter's folder, which has its name only when it is whole; `write` returns the file."""
        folder = self.best_folder
        assert folder is not None
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        with writing(self.folder, "the best drafter so far", ADVICE):
            temporary.mkdir(parents=True)
            with open(write(temporary), "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync_folder(self.folder)
