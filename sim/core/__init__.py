"""The scheduling loop: engine, plans and the ledger that makes them, what a policy sees."""
