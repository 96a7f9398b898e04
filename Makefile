# uv is used where it is, or brought into .uv.
UV := $(if $(shell command -v uv),uv,.uv/bin/uv)

.PHONY: run test check bench screenshots install

# The whole product in a minute. Without a terminal nobody can press the button, so the demo does.
run: install
	@if [ -t 0 ] && [ -t 1 ]; then $(UV) run --no-sync claim_flow.py demo; \
	else $(UV) run --no-sync claim_flow.py demo --click; fi

test: install
	$(UV) run --no-sync pytest $(PYTEST_ARGS)

check: install
	$(UV) run --no-sync ruff check
	$(UV) run --no-sync ruff format --check
	$(UV) run --no-sync mypy
	$(UV) build --quiet

bench: install
	$(UV) run --no-sync python -m tests.bench

# The pictures in docs, anew. With CI=1 nothing that is missing is skipped.
screenshots: install
	CI=1 UPDATE_SCREENSHOTS=1 $(UV) run --no-sync pytest -q tests/test_screenshots.py tests/test_browser.py \
		tests/test_inbox_browser.py

# Half of a command's start would be compiling its imports, unless that is done here.
install: $(filter .uv/bin/uv,$(UV))
	@$(UV) sync --quiet --locked --compile-bytecode
	@$(UV) run --no-sync python -m compileall -q bot flow claim_flow.py

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv
