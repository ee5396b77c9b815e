"""Token-exact prompts: ledger, encoding, chat template, drift, truncation, media. Needs no TensorDict."""
