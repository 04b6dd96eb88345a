"""One fetch: what is missing comes into a staging folder, is verified there, and only then takes its place."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import ddtree
from ddtree.errors import UserError
from ddtree.fetch.aria2 import find_aria2, run_aria2
from ddtree.fetch.hashing import Digests, digests
from ddtree.fetch.hub import Hub
from ddtree.fetch.journal import Journal
from ddtree.fetch.lock_file import LOCK_NAME, LockedFile, LockedSource, LockFile, write_lock
from ddtree.fetch.plain import download_plain, size_of, wrong_content
from ddtree.fetch.source import HubSource, ListSource
from ddtree.fetch.transfer import Tell, Transfer, Watcher
from ddtree.fetch.wanted import STAGING, WantedFile

Via = Literal["auto", "hub", "aria2c", "plain"]
_RESERVE_BYTES = 64 << 20


class Fetch:
    """Fills a folder from a source.

    Args:
        folder: where the files go; made if it is not there.
        via: what fetches: the hub's library, aria2c, or our own download. `auto` takes the library for a repository
            where it can use xet or needs a token, else our own, which goes on in the middle of a file after a kill; for
            a list aria2c where it is installed.
        jobs: files at once.
        include, exclude: patterns of paths; without include all files are wanted.
        tell: told how far it is.
    """

    def __init__(
        self,
        source: HubSource | ListSource,
        folder: Path,
        *,
        via: Via = "auto",
        jobs: int = 8,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        tell: Tell = lambda transfer: None,
    ) -> None:
        self._source, self._folder, self._via, self._jobs = source, folder, via, jobs
        self._include, self._exclude, self._tell = tuple(include), tuple(exclude), tell
        self._staging = folder / STAGING  # our own files; a repository may have some of the same names
        self._incoming = self._staging / "files"
        self._done_bytes, self._counting = 0, threading.Lock()

    def run(self) -> LockFile:
        """Go on until every file is in place.

        Raises:
            UserError: something cannot be had; what came is kept for the next run, but for wrong content.
        """
        with self._exclusive():
            hub = Hub(self._source) if isinstance(self._source, HubSource) else None
            files = self._chosen(hub.files if hub else self._source.files)  # type: ignore[union-attr]
            via = self._chosen_via(hub)
            journal = Journal(self._folder, self._staging)
            verified = self._already_there(files, journal)
            missing = [each for each in files if each.path not in verified]
            if via != "hub":
                missing = self._with_sizes(missing, must=via == "plain")
            total = sum(each.size_bytes or 0 for each in missing) + self._done_bytes
            self._require_space(missing)
            with Watcher(f"fetching by {_NAMES[via]}", self._staging, lambda: self._done_bytes, total, self._tell):
                if via == "aria2c":
                    large = [each for each in missing if each.sha256]
                    for each in large:
                        (self._incoming / each.path).parent.mkdir(parents=True, exist_ok=True)
                    run_aria2(str(find_aria2()), large, self._incoming, self._jobs)
                self._in_threads(missing, lambda each: self._bring(each, via, hub, journal, verified))
            lock = self._lock_file(files, verified, hub)
            write_lock(self._folder, lock)
            shutil.rmtree(self._staging, ignore_errors=True)
        return lock

    def _bring(
        self, wanted: WantedFile, via: Via, hub: Hub | None, journal: Journal, verified: dict[str, Digests]
    ) -> None:
        """Fetch one file, verify it, and move it into place."""
        (self._incoming / wanted.path).parent.mkdir(parents=True, exist_ok=True)
        if via == "hub" or wanted.sha256 is None:  # a repository's small files have no SHA-256 to fetch by
            assert hub is not None
            came = hub.download(wanted, self._incoming)
        elif via == "plain":
            came = download_plain(wanted, self._incoming)
        else:
            came = self._incoming / wanted.path
        try:
            found = digests(came)
        except OSError as error:
            raise UserError(f"{wanted.path} did not come ({error.strerror})", "run the same command again") from error
        if not is_right(wanted, found):
            came.unlink()
            came.with_name(came.name + ".aria2").unlink(missing_ok=True)
            raise wrong_content(wanted)
        place = self._folder / wanted.path
        place.parent.mkdir(parents=True, exist_ok=True)
        with came.open("rb") as file:
            os.fsync(file.fileno())
        (self._folder / LOCK_NAME).unlink(missing_ok=True)  # until the end, files of two versions may stand together
        came.replace(place)
        journal.add(wanted.path, found)
        verified[wanted.path] = found
        with self._counting:
            self._done_bytes += found.size_bytes

    def _already_there(self, files: Sequence[WantedFile], journal: Journal) -> dict[str, Digests]:
        """Files in place with the right content; others in their place are fetched again."""
        found: dict[str, Digests] = {}
        unread = [each for each in files if (self._folder / each.path).is_file()]
        total = sum((self._folder / each.path).stat().st_size for each in unread)
        read = 0

        def tell(size: int) -> None:
            nonlocal read
            with self._counting:
                read += size
            self._tell(Transfer("checking what is there", read, total))

        def look(wanted: WantedFile) -> None:
            path = self._folder / wanted.path
            size = path.stat().st_size
            known = journal.find(wanted.path)
            if known is None and wanted.size_bytes in (None, size):
                known = digests(path, tell)
            if known is not None and is_right(wanted, known):
                journal.add(wanted.path, known)
                found[wanted.path] = known
                with self._counting:
                    self._done_bytes += known.size_bytes

        self._in_threads(unread, look)
        return found

    def _in_threads(self, files: Sequence[WantedFile], work: Callable[[WantedFile], None]) -> None:
        """Several at once; after a failure those under way end, and the first failure is raised.

        The threads are daemons: on Ctrl-C the process ends at once, and the next one goes on.
        """
        waiting: SimpleQueue[WantedFile] = SimpleQueue()
        for each in sorted(files, key=lambda file: -(file.size_bytes or 0)):
            waiting.put(each)
        failures: list[Exception] = []

        def take() -> None:
            while not failures:
                try:
                    each = waiting.get_nowait()
                except Empty:
                    return
                try:
                    work(each)
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=take, daemon=True) for _ in range(min(self._jobs, len(files)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _chosen(self, files: Sequence[WantedFile]) -> list[WantedFile]:
        chosen = [
            each
            for each in files
            if (not self._include or any(fnmatchcase(each.path, pattern) for pattern in self._include))
            and not any(fnmatchcase(each.path, pattern) for pattern in self._exclude)
        ]
        if not chosen:
            raise UserError(f"{self._source} has no file that is wanted", "correct --include and --exclude")
        return chosen

    def _chosen_via(self, hub: Hub | None) -> Via:
        if self._via == "auto":
            if hub:
                return "hub" if hub.has_xet or hub.has_token else "plain"
            return "aria2c" if find_aria2() else "plain"
        if self._via == "hub" and hub is None:
            raise UserError("--via hub fetches repositories only", "leave it out, or name owner/name@revision")
        if self._via == "aria2c" and find_aria2() is None:
            raise UserError("aria2c is not installed", "apt install aria2, or leave --via out")
        return self._via

    def _with_sizes(self, files: Sequence[WantedFile], must: bool) -> list[WantedFile]:
        """Sizes by the servers' account, where the source tells none."""
        sized: dict[str, int] = {}

        def ask(wanted: WantedFile) -> None:
            try:
                sized[wanted.path] = wanted.size_bytes if wanted.size_bytes is not None else size_of(wanted)
            except UserError:
                if must:
                    raise

        self._in_threads(files, ask)
        return [replace(each, size_bytes=sized.get(each.path)) for each in files]

    def _require_space(self, missing: Sequence[WantedFile]) -> None:
        needed = sum(each.size_bytes or 0 for each in missing) + _RESERVE_BYTES
        held = sum(path.stat().st_blocks * 512 for path in self._staging.rglob("*") if path.is_file())
        free = shutil.disk_usage(self._folder).free + held
        if free < needed:
            raise UserError(
                f"{self._folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed",
                "free some, or choose another --to",
            )

    def _lock_file(self, files: Sequence[WantedFile], verified: dict[str, Digests], hub: Hub | None) -> LockFile:
        source = self._source
        told = LockedSource(
            kind="hub" if isinstance(source, HubSource) else "urls",
            name=source.repo if isinstance(source, HubSource) else source.name,
            asked_revision=source.revision if isinstance(source, HubSource) else None,
            revision=hub.commit if hub else None,
            list_sha256=source.sha256 if isinstance(source, ListSource) else None,
            include=self._include,
            exclude=self._exclude,
        )
        locked = [
            LockedFile(
                path=each.path,
                size_bytes=verified[each.path].size_bytes,
                sha256=verified[each.path].sha256,
                url=each.url,
            )
            for each in sorted(files, key=lambda file: file.path)
        ]
        return LockFile(
            tool=f"ddtree {ddtree.__version__}", fetched_unix_s=time.time(), source=told, files=tuple(locked)
        )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Nobody else fills the folder meanwhile; the operating system frees it even if the process is killed."""
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            lock = (self._staging / "lock").open("ab")
        except OSError as error:
            raise UserError(f"cannot write to {self._folder} ({error.strerror})", "choose another --to") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another ddtree fetch fills {self._folder}", "wait for it, or choose another --to"
                ) from None
            yield


_NAMES = {"hub": "huggingface_hub", "aria2c": "aria2c", "plain": "ddtree"}


def is_right(wanted: WantedFile, found: Digests) -> bool:
    """Whether content is what the source pins."""
    if wanted.size_bytes is not None and wanted.size_bytes != found.size_bytes:
        return False
    if wanted.sha256 is not None:
        return wanted.sha256 == found.sha256
    return wanted.git_sha1 is not None and wanted.git_sha1 == found.git_sha1
