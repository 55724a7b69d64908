import pytest
import torch


@pytest.fixture
def double():
    """In double precision, where rounding decides nothing in a hundred steps."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
