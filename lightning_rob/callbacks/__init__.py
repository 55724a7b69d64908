"""Callbacks that watch robustness."""

from lightning_rob.callbacks.robust_eval import RobustEval

__all__ = ["RobustEval"]
