"""`python -m lightning_rob` is `lightning-rob`."""

from lightning_rob.cli import main

main()
