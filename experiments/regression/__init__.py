"""Results that must not change unnoticed."""
