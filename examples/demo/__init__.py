"""`python -m examples.demo`: exact attention in a real encoder, then against the plain formula."""
