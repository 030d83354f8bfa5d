"""What the command line exits with, beside 0."""

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130
