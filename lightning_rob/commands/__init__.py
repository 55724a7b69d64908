"""The commands of `lightning-rob` that do not train or test."""
