"""The Hugging Face hub, through its own library: what a revision holds, and its files."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from ddtree.errors import UserError
from ddtree.fetch.source import HubSource
from ddtree.fetch.wanted import WantedFile, checked_path

# Its own bars would run into ours.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

_TRIES = 5


class Hub:
    """One repository.

    Attributes:
        commit: what the revision names now.
        files: all files of the commit.
    has_xet: whether the library fetches large files by xet.
    has_token: whether the user is logged in.

    Raises:
        UserError: the hub cannot be reached, or has no such repository or revision for this user.
    """

    def __init__(self, source: HubSource) -> None:
        from huggingface_hub import HfApi, constants, get_token

        self._source, self._endpoint = source, constants.ENDPOINT
        self.has_token = get_token() is not None
        self.has_xet = find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
        try:
            info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=30)
        except Exception as error:
            raise _in_words(source, error) from error
        if not info.sha:
            raise UserError(f"the hub tells no commit for {source}", "name the commit itself")
        self.commit: str = info.sha
        self.files = tuple(self._wanted(sibling) for sibling in info.siblings or ())

    def _wanted(self, sibling: object) -> WantedFile:
        path = checked_path(str(getattr(sibling, "rfilename")), str(self._source))  # noqa: B009 - of any version
        lfs = getattr(sibling, "lfs", None)
        sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
        url = f"{self._endpoint}/{self._source.repo}/resolve/{self.commit}/{quote(path)}"
        blob = getattr(sibling, "blob_id", None)
        if not sha256 and not blob:
            raise UserError(f"the hub tells no hash of {path} in {self._source}", "fetch it by a list: --urls FILE")
        return WantedFile(path, getattr(sibling, "size", None), sha256, None if sha256 else blob, url)

    def download(self, wanted: WantedFile, staging: Path) -> Path:
        """Bring a file into ``staging``. The library goes on after a broken connection, but not after a kill.

        Raises:
            UserError: the network fails; what came stays for the next run.
        """
        from huggingface_hub import hf_hub_download

        for attempt in range(_TRIES):
            try:
                return Path(hf_hub_download(self._source.repo, wanted.path, revision=self.commit, local_dir=staging))
            except OSError as error:
                if getattr(error, "errno", None) is not None or attempt == _TRIES - 1:
                    raise _in_words(self._source, error, wanted.path) from error
            except Exception as error:
                if attempt == _TRIES - 1:
                    raise _in_words(self._source, error, wanted.path) from error
        raise AssertionError("the last try returns or raises")


def _in_words(source: HubSource, error: Exception, path: str = "") -> UserError:
    from huggingface_hub import errors

    what = f"{path} of {source}" if path else str(source)
    said = " ".join(str(error).split())[:200]
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{source.repo} is gated", "accept its terms on the hub, then log in: hf auth login")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"the hub has no repository {source.repo} for this user", "check the name, or log in: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{source.repo} has no revision {source.revision}", "name a commit, tag or branch of it")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return UserError(f"{source.repo} has no file {path} at that commit", "fetch again")
    if (
        isinstance(error, OSError)
        and error.errno is not None
        and error.strerror
        and not isinstance(error, ConnectionError)
    ):
        return UserError(f"cannot write {what} ({error.strerror})", "free some space, or choose another --to")
    return UserError(
        f"the hub could not serve {what} ({type(error).__name__}: {said})",
        "check the network and run the same command again; it continues from there",
    )
