"""The command `lightning-rob monitor`: robustness of the checkpoints of a run as they appear."""
