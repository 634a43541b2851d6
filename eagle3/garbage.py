"""What lies under the output folder and is held by nothing any more (beside the walk; `stage=gc` lists and deletes it).

As in git, names hold what they lead to, and the names are runs: one that is done, still works or is young holds what it
read and wrote, and an artifact holds what it was made from. So whoever gives up an experiment deletes its run folders,
and what only they held is garbage. Only manifests and run folders are read here, no data.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eagle3.artifacts import MANIFEST, Artifact, Artifacts, is_locked
from eagle3.errors import RequestError
from eagle3.records import Record, folder_bytes, read_json

PARTIAL, DELETED = ".partial", ".deleted"
# Runs that came to something or still may; of one on another host nobody here can tell.
HOLDING = ("done", "running", "no result")


@dataclass(frozen=True)
class Garbage:
    """One folder that can go: its name below the output folder, bytes, seconds since its last use, and why."""

    folder: Path
    name: str
    size_bytes: int
    idle_s: float
    why: str


@dataclass(frozen=True)
class Survey:
    """What was found: garbage, the largest first, and how many artifacts of how many bytes are kept."""

    garbage: list[Garbage]
    kept: int
    kept_bytes: int


class Holdings:
    """Who holds what under an output folder at this moment; what was used within `younger_s` is never given up."""

    def __init__(self, root: Path, younger_s: float) -> None:
        self.root, self.younger_s, self.now = root, younger_s, time.time()
        self._manifests = {
            _name(folder): read_json(folder / MANIFEST)
            for folder in folders(root / "artifacts")
            if folder.suffix not in (PARTIAL, DELETED)
        }
        # A run folder that somebody placed elsewhere (hydra.run.dir) is known by what it made.
        self._makers = {name: self._maker(manifest.get("run")) for name, manifest in self._manifests.items()}
        places = {*folders(root / "runs"), *folders(root / "sweeps"), *self._makers.values()}
        self._runs = {folder: Record(folder) for folder in places if folder is not None}
        self._held: set[str] = set()
        self._last_use: dict[str, float] = {}
        for record in self._runs.values():
            names = [f"{entry['kind']}/{entry['id']}" for entry in record.lineage]
            for name in names:
                self._last_use[name] = max(self._used(record), self._last_use.get(name, 0.0))
            if record.status in HOLDING or self._is_young(self._used(record)):
                self._hold(names)
        self._useful = {maker for name, maker in self._makers.items() if name in self._held}

    def unheld(self, folder: Path) -> tuple[float, str] | None:
        """When an artifact's folder was last used, and why it can go; None when it has to stay."""
        name = _name(folder)
        manifest = self._manifests.get(name)
        if folder.suffix == DELETED:
            used, why = 0.0, "its deletion was cut short"
        elif folder.suffix == PARTIAL:
            used, why = _newest(folder), "never finished"
        elif name in self._held:
            return None
        elif not manifest:
            used, why = _newest(folder), f"no readable {MANIFEST}"
        else:
            maker = self._makers[name]
            used = max((folder / MANIFEST).stat().st_mtime, self._last_use.get(name, 0.0))
            why = "the run that made it is gone" if maker is None else f"made by a run that {_words(self._runs[maker])}"
            why += ", no finished run uses it"
        return None if self._is_young(used) else (used, why)

    def useless(self, folder: Path) -> tuple[float, str] | None:
        """When a run was last at work, and why its folder can go; None when it has to stay."""
        record = self._runs.get(folder) or Record(folder)
        used = self._used(record)
        if folder in self._useful or record.status in HOLDING or self._is_young(used):
            return None
        return used, f"{_words(record)}, nothing that is kept came from it"

    def _hold(self, names: list[str]) -> None:
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in self._held:
                self._held.add(name)
                waiting += self._manifests.get(name, {}).get("made_from", [])

    def _maker(self, given: str | None) -> Path | None:
        folder = None if given is None else (self.root / "artifacts" / given).resolve()
        return folder if folder is not None and folder.is_dir() else None

    def _used(self, record: Record) -> float:
        if record.status == "running":
            return self.now
        stamp = record.provenance.get("finished") or record.provenance.get("started")
        return datetime.fromisoformat(stamp).timestamp() if stamp else _newest(record.folder)

    def _is_young(self, used: float) -> bool:
        return self.now - used < self.younger_s


def survey(root: Path, younger_s: float) -> Survey:
    """Looks through `<root>/artifacts` and `<root>/runs` for what has lain unused for `younger_s` and is held by
    nothing.

    Jobs of sweeps hold artifacts and stay; what a process has locked stays, and links stay.
    """
    root = root.resolve()
    holdings = Holdings(root, younger_s)
    artifacts, garbage = folders(root / "artifacts"), []
    for folder in artifacts:
        found = holdings.unheld(folder)
        if found is not None and not is_locked(_artifact(folder)):
            garbage.append(_garbage(holdings, folder, *found))
    kept = {*artifacts} - {each.folder for each in garbage}
    garbage += [
        _garbage(holdings, folder, *found)
        for folder in folders(root / "runs")
        if (found := holdings.useless(folder)) is not None
    ]
    garbage.sort(key=lambda each: (-each.size_bytes, each.name))
    return Survey(garbage, len(kept), sum(map(folder_bytes, kept)))


def delete(
    artifacts: Artifacts, garbage: Sequence[Garbage], younger_s: float
) -> Iterator[tuple[Garbage, RequestError | OSError | None]]:
    """Deletes folders that a survey found; yields each with what kept it: a RequestError where it has come to be held.

    Artifacts lose their names first, all at one look at who holds what now: deleting takes long, and one that is cut
    short leaves nothing that looks complete.
    """
    holdings = Holdings(artifacts.root.parent.resolve(), younger_s)
    going: list[tuple[Garbage, Path]] = []
    for each in garbage:
        try:
            going.append((each, _set_aside(artifacts, holdings, each)))
        except (RequestError, OSError) as error:
            yield each, error
    for each, folder in going:
        try:
            shutil.rmtree(folder)
            if folder.is_relative_to(holdings.root / "runs") and not any(folder.parent.iterdir()):
                folder.parent.rmdir()
        except OSError as error:
            yield each, error
        else:
            yield each, None


def _set_aside(artifacts: Artifacts, holdings: Holdings, garbage: Garbage) -> Path:
    """Takes an artifact's name, so that nobody can come to use it; returns the folder to delete."""
    folder = garbage.folder
    if folder.is_relative_to(holdings.root / "runs"):
        if holdings.useless(folder) is None:
            raise RequestError(f"{garbage.name}: is used again, so it stays")
        return folder
    with artifacts.lock(_artifact(folder)):
        if holdings.unheld(folder) is None:
            raise RequestError(f"{garbage.name}: is used again, so it stays")
        return folder.rename(folder.with_name(_artifact(folder).id + DELETED))


def folders(root: Path) -> list[Path]:
    """The folders two levels below `root`, links left out."""
    return [path for path in sorted(root.glob("*/*")) if path.is_dir() and not path.is_symlink()]


def _artifact(folder: Path) -> Artifact:
    """The artifact that a folder holds, whatever state it is in."""
    name = folder.name.removesuffix(PARTIAL).removesuffix(DELETED)
    return Artifact(folder.parent.name, name, folder.with_name(name))


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{_artifact(folder).id}"


def _words(record: Record) -> str:
    return {"starting": "did not begin", "killed": "was killed"}.get(record.status, f"ended as {record.status}")


def _garbage(holdings: Holdings, folder: Path, used: float, why: str) -> Garbage:
    name = str(folder.relative_to(holdings.root)).removeprefix("artifacts/")
    return Garbage(folder, name, folder_bytes(folder), holdings.now - used, why)


def _newest(folder: Path) -> float:
    """When something below a folder was last changed."""
    return max((path.lstat().st_mtime for path in folder.rglob("*")), default=folder.stat().st_mtime)
