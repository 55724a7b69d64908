"""`lightning-rob compare`: records of the same images beside each other."""
