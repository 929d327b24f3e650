"""The doctor: checks a database for everything that Moored needs, and how each finding is fixed."""

from ._check import Check, Connected, Finding, Severity
from ._examine import CHECKS, Examination, examine

__all__ = ["CHECKS", "Check", "Connected", "Examination", "Finding", "Severity", "examine"]
