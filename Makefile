# uv is used where it is, or brought into .uv.
UV := $(if $(shell command -v uv),uv,.uv/bin/uv)

.PHONY: run test check bench install

# The main job: a small claim is paid at once, a large one waits, and is approved by a second process.
run: install
	@for command in \
	  "start --thread t0 --amount 20" \
	  "start --thread t1 --amount 250" \
	  "resume --thread t1 --approve" \
	  "resume --thread t1 --approve" \
	  "list"; do \
	    echo; echo "\$$ $(UV) run claim_flow.py $$command"; \
	    $(UV) run --quiet claim_flow.py $$command || exit 1; \
	done

test: install
	$(UV) run --quiet pytest $(PYTEST_ARGS)

check: install
	$(UV) run --quiet ruff check
	$(UV) run --quiet ruff format --check
	$(UV) run --quiet mypy
	$(UV) build --quiet

bench: install
	$(UV) run --quiet python -m tests.bench

install: $(filter .uv/bin/uv,$(UV))
	@$(UV) sync --quiet --locked
	@.venv/bin/python -m compileall -q bot flow claim_flow.py

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv
