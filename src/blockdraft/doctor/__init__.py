"""Find out why a drafter accepts nothing: examine its folder, whoever wrote it, and measure how it can be read."""

from blockdraft.doctor.examination import examine
from blockdraft.doctor.folder import Diagnosis, Finding, Measured

__all__ = ["Diagnosis", "Finding", "Measured", "examine"]
