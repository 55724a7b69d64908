"""Checks for a false sense of security; see `lightning_rob.audit.auditor.audit`."""
