"""The systems tightship answers to, as they are: each says which of their behaviors it reproduces."""
