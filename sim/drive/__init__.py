"""Who steps engines: clocks and arrivals."""
