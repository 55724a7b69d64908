"""Checks for a false sense of security: `lightning_rob.audit.auditor.audit`, and `power`."""

from lightning_rob.evaluation.power import Power as Power
from lightning_rob.evaluation.power import power as power
