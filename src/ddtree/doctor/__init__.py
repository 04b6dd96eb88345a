"""What speaks against a start on this machine, found before anything is started."""

from ddtree.doctor.checkup import Checkup, examine
from ddtree.doctor.condition import Condition, Grade
from ddtree.doctor.needs import Needs
from ddtree.doctor.recording import Recording, read_recording, take_recording

__all__ = ["Checkup", "Condition", "Grade", "Needs", "Recording", "examine", "read_recording", "take_recording"]
