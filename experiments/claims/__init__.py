"""Claims of the literature, held against simulations."""
