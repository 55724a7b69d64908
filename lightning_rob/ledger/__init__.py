"""What is kept of each image of an evaluation, on the way and for good."""

from lightning_rob.ledger.book import Book
from lightning_rob.ledger.card import card_of
from lightning_rob.ledger.columns import Columns, Outcome, predicted_class
from lightning_rob.ledger.identity import describe, fingerprint, key_of
from lightning_rob.ledger.journal import Journal
from lightning_rob.ledger.pictures import save_images
from lightning_rob.ledger.table import Ledger, read_ledger, write_ledger

__all__ = [
    "Book",
    "Columns",
    "Journal",
    "Ledger",
    "Outcome",
    "card_of",
    "describe",
    "fingerprint",
    "key_of",
    "predicted_class",
    "read_ledger",
    "save_images",
    "write_ledger",
]
