"""The commands of `lightning-rob` that go beyond Lightning's fit, validate, test and predict."""
