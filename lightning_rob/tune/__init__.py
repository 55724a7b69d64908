"""The command `lightning-rob tune`: Bayesian optimisation over the keys of a recipe."""
