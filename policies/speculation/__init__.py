"""How many tokens to draft; one file each."""
