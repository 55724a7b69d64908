"""Per-image records of evaluations: on the way in a journal, in the end in a file."""

from lightning_rob.ledger.book import PerImageResults
from lightning_rob.ledger.card import card_of
from lightning_rob.ledger.columns import Outcome, predicted_class
from lightning_rob.ledger.identity import describe, fingerprint
from lightning_rob.ledger.identity import key_of as cache_key
from lightning_rob.ledger.pictures import save_images
from lightning_rob.ledger.table import Ledger, PerImageRows, read_ledger, write_per_image

__all__ = [
    "Ledger",
    "Outcome",
    "PerImageResults",
    "PerImageRows",
    "cache_key",
    "card_of",
    "describe",
    "fingerprint",
    "predicted_class",
    "read_ledger",
    "save_images",
    "write_per_image",
]
