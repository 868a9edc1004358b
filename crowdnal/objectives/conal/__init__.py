"""CoNAL and its EM variant: a confusion that all annotators share beside their own."""
