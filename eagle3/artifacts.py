"""Artifacts: what a stage makes, kept under `<output_dir>/artifacts/<kind>/<id>/` and found again by its id.

Beside the walk: every stage asks here whether its result exists already, and hands it over here when it is done. An
artifact is complete or absent: work grows in `<id>.partial/`, the manifest is written last, everything is fsynced, and
the folder is renamed. The id hashes what determines the content, so an unchanged stage is a hit and a changed one can
never reuse stale data.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from eagle3.errors import AbsentError, RequestError, StoreError
from eagle3.file_list import find_faults, list_files

MANIFEST = "manifest.json"
# How often a process looks whether another one is done.
POLL_S = 1.0
log = logging.getLogger("eagle3")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is no plain value: {value!r}")


def canonical(value: Any) -> str:
    """One spelling of a plain value (dicts, lists, strings, numbers, dataclasses) as JSON: sorted keys, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a plain value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def artifact_id(kind: str, identity: dict[str, Any]) -> str:
    """The id of the artifact of this kind whose content `identity` determines."""
    return digest({"kind": kind, "identity": identity})


def fsync_folder(folder: Path) -> None:
    """Makes the names inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically and durably: a reader sees the old text or the new, never a part."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


@dataclass(frozen=True)
class Artifact:
    """One artifact, made or not: `folder` is where it is (or will be) once complete."""

    kind: str
    id: str
    folder: Path
    identity: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def partial(self) -> Path:
        """Where it grows until it is complete."""
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def complete(self) -> bool:
        """True once the manifest is in place."""
        return (self.folder / MANIFEST).is_file()

    def manifest(self) -> dict[str, Any]:
        """The manifest; StoreError when it is absent or cannot be read."""
        path = self.folder / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(f"{path}: not found, so {self.kind} {self.id} is not complete") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read ({error}); delete {self.folder} and make it again") from error
        if not isinstance(found, dict):
            raise StoreError(f"{path}: found a {type(found).__name__}, expected an object; delete {self.folder}")
        return found

    def faults(self, contents: bool) -> list[str]:
        """What is wrong with the files that the manifest lists, by their sizes or by all of their contents."""
        return find_faults(self.folder, self.manifest().get("files", {}), contents)

    def check_sizes(self, make: str) -> None:
        """StoreError when a file is absent or has another size than the manifest lists; `make` makes it again."""
        if faults := self.faults(contents=False):
            more = f" (the first of {len(faults)} such files)" if len(faults) > 1 else ""
            raise StoreError(f"{faults[0]}{more}; {self.remake(make)}")

    def remake(self, make: str) -> str:
        """What to do about a damaged one."""
        return f"delete {self.folder} and run `{make}` with the same settings to make it again"


class Artifacts:
    """All artifacts under one root folder.

    `attached` marks a helper rank of a training run: it sees the folders and writes, locks and renames nothing.
    `context` is added to every manifest that is committed (the run that made it, what it was made from).
    """

    def __init__(self, root: Path, attached: bool = False) -> None:
        self.root = Path(root)
        self.attached = attached
        self.context: dict[str, Any] = {}
        # Folders that this process completed or extended.
        self.written: set[Path] = set()
        self._locks: dict[Path, int] = {}

    def of(self, kind: str, identity: dict[str, Any]) -> Artifact:
        """The artifact that `identity` leads to, whether or not it exists."""
        name = artifact_id(kind, identity)
        return Artifact(kind, name, self.root / kind / name, identity)

    def resolve(
        self,
        kind: str,
        given: str | None,
        expected: Callable[[], Artifact] | None,
        make: str,
        field: str | None = None,
    ) -> Artifact:
        """The artifact to read: the id or folder that the user gave, else the `expected` one that the config leads to.

        AbsentError when it is not made or half-written, RequestError when it is of another kind or its manifest broken
        or lost, StoreError when its files have other sizes; `make` is the command that makes it, `field` where the user
        gave it (`inputs.KIND` unless said).
        """
        if given is not None:
            artifact, where = self._given(kind, given), f"{field or f'inputs.{kind}'}={given}"
        else:
            assert expected is not None
            artifact, where = expected(), kind
        if artifact.complete:
            try:
                manifest = artifact.manifest()
            except StoreError as error:
                raise RequestError(str(error)) from error
            found = manifest.get("kind", kind)
            if found != kind:
                raise RequestError(
                    f"{where}: {artifact.folder} holds a {found} artifact, expected {kind}; run `{make}`"
                )
            artifact.check_sizes(make)
            return dataclasses.replace(artifact, id=manifest.get("id", artifact.id))
        if artifact.partial.exists():
            raise AbsentError(
                f"{where}: {artifact.partial} is half-written, expected a complete artifact; run `{make}` with the "
                "same settings to finish it"
            )
        found = "a folder without a manifest" if artifact.folder.exists() else "nothing"
        others = "" if given is None else self._newest(kind)
        raise (RequestError if artifact.folder.exists() else AbsentError)(
            f"{where}: found {found} at {artifact.folder}, expected a complete {kind} artifact{others}; run `{make}` "
            "with the same settings"
        )

    def _newest(self, kind: str) -> str:
        """Which artifacts of a kind could have been meant, in words."""
        manifests = sorted((self.root / kind).glob(f"*/{MANIFEST}"), key=lambda path: -path.stat().st_mtime)
        names = [path.parent.name for path in manifests if not path.parent.suffix]
        more = f" and {len(names) - 3} older ones" if len(names) > 3 else ""
        return f" (there: {', '.join(names[:3])}{more})" if names else " (none is there)"

    def _given(self, kind: str, given: str) -> Artifact:
        """A folder (a run folder's link to it, too), or an id, of which a beginning is enough when only one fits.

        `kind/id`, as `stage=runs` lists artifacts, is an id, too.
        """
        if given.startswith(f"{kind}/") and not Path(given).exists():
            given = given.removeprefix(f"{kind}/")
        if os.sep in given or Path(given).is_dir():
            folder = Path(given).expanduser().resolve()
        else:
            fitting = [path for path in (self.root / kind).glob(f"{glob.escape(given)}*") if not path.suffix]
            folder = fitting[0] if len(fitting) == 1 else self.root / kind / given
        return Artifact(kind, folder.name, folder)

    @contextmanager
    def lock(self, artifact: Artifact, wait: bool = False) -> Iterator[None]:
        """Holds the artifact against other processes. When one holds it: waits for it, or RequestError at once."""
        self._acquire(artifact, wait)
        try:
            yield
        finally:
            self.release(artifact)

    def claim(self, artifact: Artifact) -> bool:
        """Takes the artifact for `begin`, after whoever makes it now. False (and no lock) when it is complete then."""
        if self.attached:
            return True
        self._acquire(artifact, wait=True)
        if artifact.complete:
            self.release(artifact)
        return not artifact.complete

    def begin(self, artifact: Artifact, resume: bool = False) -> Path:
        """The folder to work in, locked against other processes until `commit`; emptied unless `resume`."""
        if self.attached:
            return artifact.partial
        self._acquire(artifact)
        try:
            if artifact.complete:
                raise RequestError(
                    f"{artifact.folder}: another process has completed it meanwhile; run again to use it"
                )
            if artifact.folder.exists():
                raise RequestError(f"{artifact.folder}: exists without a manifest, so nobody can use it; delete it")
            if artifact.partial.exists() and not resume:
                shutil.rmtree(artifact.partial)
            artifact.partial.mkdir(parents=True, exist_ok=True)
        except BaseException:
            self.release(artifact)
            raise
        return artifact.partial

    def commit(self, artifact: Artifact, manifest: dict[str, Any]) -> None:
        """Completes what `begin` started: manifest last, with its files' checksums, everything fsynced, one rename."""
        if self.attached:
            return
        listed = {**manifest, "files": list_files(artifact.partial)}
        write_json(artifact.partial / MANIFEST, self._stamped(artifact, listed))
        for folder, _, files in os.walk(artifact.partial):
            for name in files:
                with open(Path(folder) / name, "rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(Path(folder))
        os.rename(artifact.partial, artifact.folder)
        fsync_folder(artifact.folder.parent)
        self.written.add(artifact.folder)
        self.release(artifact)

    def amend(self, artifact: Artifact, manifest: dict[str, Any]) -> None:
        """Replaces the manifest of a complete artifact (states that gained layers)."""
        if not self.attached:
            listed = {"files": artifact.manifest().get("files", {}), **manifest}
            write_json(artifact.folder / MANIFEST, self._stamped(artifact, listed))
            self.written.add(artifact.folder)

    def release(self, artifact: Artifact) -> None:
        """Gives the lock back; nothing happens when it is not held."""
        handle = self._locks.pop(artifact.folder, None)
        if handle is not None:
            drop_lock(_lock_path(artifact), handle)

    def close(self) -> None:
        """Gives every lock back, so that a failed stage can be tried again by the same process."""
        for folder in list(self._locks):
            self.release(Artifact(folder.parent.name, folder.name, folder))

    def _stamped(self, artifact: Artifact, manifest: dict[str, Any]) -> dict[str, Any]:
        made = {
            "kind": artifact.kind,
            "id": artifact.id,
            "created": datetime.now().astimezone().isoformat("T", "seconds"),
        }
        return {**made, **self.context, "identity": artifact.identity, **manifest}

    def _acquire(self, artifact: Artifact, wait: bool = False) -> None:
        said = False
        while artifact.folder not in self._locks:
            try:
                self._locks[artifact.folder] = take_lock(_lock_path(artifact), str(artifact.partial))
            except Held as held:
                if not wait:
                    raise
                if not said:
                    log.info("%s: is being made by %s; waiting for it", artifact.partial, held.owner)
                said = True
                time.sleep(POLL_S)


class Held(RequestError):
    """Another process, `owner`, holds what this one wants."""

    def __init__(self, what: str, owner: str) -> None:
        super().__init__(f"{what}: is being made by {owner}; wait for it, or stop it and run again")
        self.owner = owner


def take_lock(path: Path, what: str) -> int:
    """Locks `path` for this process and returns the open handle; Held at once when another process has it.

    The kernel drops an flock when its owner dies, so a dead owner's lock is free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise Held(what, owner) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                os.close(handle)
                raise
            log.warning("%s: this file system has no locks; do not start the same stage twice at once", path.parent)
        with suppress(FileNotFoundError):  # a previous owner may have removed the name between our open and our lock
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        os.close(handle)
    with suppress(OSError):  # on a full disk the lock holds without its owner's name, so that gc can make room
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def drop_lock(path: Path, handle: int) -> None:
    """Gives a lock back."""
    path.unlink(missing_ok=True)
    os.close(handle)


def is_locked(artifact: Artifact) -> bool:
    """Whether a process holds the artifact; asking takes nothing from anybody. True where nobody can tell."""
    try:
        handle = os.open(_lock_path(artifact), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _lock_path(artifact: Artifact) -> Path:
    return artifact.folder.with_name(artifact.folder.name + ".lock")
