# Every target does the set-up it needs by itself.
SHELL := /bin/bash

.PHONY: setup build demo demo-train test test-long lint format clean

setup: ## Debian packages and the Python environment .venv
	@tools/setup

build: setup ## the library and its C++ tests, in build/dev
	@tools/ci/build dev

demo: setup ## exact attention inside a real encoder, and against the plain formula
	@tools/ci/demo

demo-train: ## two language models learn and write; installs PyTorch (CPU build) into .venv
	@tools/setup --with-torch
	@tools/ci/demo --train

test: ## every lint, build and test, as CI runs them
	@tools/ci/test

test-long: ## the same with the long random tests
	@tools/ci/test --long

lint: setup ## formatters, linters and the project's own checks
	@tools/lint/all

format: setup ## rewrite the sources as the formatters want them
	@tools/lint/all --fix

clean: ## build output, not .venv
	rm -rf build
