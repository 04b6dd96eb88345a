"""What the demo needs: a small target from the package index, the drafter shipped with ddtree, three prompts."""

from __future__ import annotations

from pathlib import Path

from ddtree.demo.prompts import PROMPTS, DemoPrompt
from ddtree.demo.target import target_folder

__all__ = ["PROMPTS", "DemoPrompt", "drafter_folder", "target_folder"]


def drafter_folder() -> Path:
    """The DFlash drafter for SmolLM2-135M-Instruct that is part of this package."""
    return Path(__file__).with_name("drafter")
