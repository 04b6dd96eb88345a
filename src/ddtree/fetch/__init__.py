"""Weights by pinned revision: fetched over any number of runs, verified byte for byte, written down in a lock file."""

from ddtree.fetch.check import CheckResult, check_folder
from ddtree.fetch.lock_file import LOCK_NAME, LockFile, read_lock
from ddtree.fetch.run import Fetch
from ddtree.fetch.source import HubSource, ListSource, parse_hub, read_list
from ddtree.fetch.transfer import Transfer

__all__ = [
    "LOCK_NAME",
    "CheckResult",
    "Fetch",
    "HubSource",
    "ListSource",
    "LockFile",
    "Transfer",
    "check_folder",
    "parse_hub",
    "read_list",
    "read_lock",
]
