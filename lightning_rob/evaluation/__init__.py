"""Scores of a defense under attack: which images are attacked together, and the worst case."""

from lightning_rob.evaluation.groups import GROUP_SIZE, canonical_groups, group_loader, serves_once
from lightning_rob.evaluation.worst import Worst, is_random, worst_case

__all__ = [
    "GROUP_SIZE",
    "Worst",
    "canonical_groups",
    "group_loader",
    "is_random",
    "serves_once",
    "worst_case",
]
