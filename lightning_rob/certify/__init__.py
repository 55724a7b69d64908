"""Certificates: radii within which no attack can change a smoothed prediction."""

from lightning_rob.certify.certificates import Certificates
from lightning_rob.certify.smoothing import certify

__all__ = ["Certificates", "certify"]
