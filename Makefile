# Both install what they need first (see scripts/setup.sh).
CARGO_BIN := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin
export PATH := $(CARGO_BIN):$(PATH)
PROMPT ?= Once upon a time there was a little fox who

.PHONY: demo test setup
demo: setup
	@cargo build --release --locked -p sluice
	@printf '\n%s' "$(PROMPT)"
	@target/release/sluice run --stats --raw -n 120 "$(PROMPT)"

test: setup
	cargo test --release --locked --workspace

setup:
	@scripts/setup.sh
