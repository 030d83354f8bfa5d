"""What takes vLLM itself: `make test-vllm` runs it in an environment of its own."""
