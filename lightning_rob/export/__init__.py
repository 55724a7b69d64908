"""The command `lightning-rob export`: a whole defense as one program that needs torch alone."""
