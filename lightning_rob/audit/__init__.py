"""Does a defense only seem robust? See `lightning_rob.audit.auditor.audit`."""
