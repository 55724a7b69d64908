"""The command `lightning-rob bpda`: a network for each transform, whose gradient stands in."""
