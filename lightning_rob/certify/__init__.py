"""Certificates: radii within which no attack can change a smoothed prediction."""

from lightning_rob.certify.smoothing import Certificates as Certificates
from lightning_rob.certify.smoothing import certify as certify
