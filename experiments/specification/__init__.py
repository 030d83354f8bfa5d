"""What an experiment is: its keys, read strictly from YAML."""
