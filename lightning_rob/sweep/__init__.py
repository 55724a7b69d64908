"""The command `lightning-rob sweep`: attacks against a checkpoint, value by value of a variable."""
