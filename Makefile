# The two commands of the README are `make demo` and `make test`; everything behind them is Python.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
CHECK  := $(RUN) tests/tools/checks.py

.DEFAULT_GOAL := help
.PHONY: help venv demo lab down test lint sanity units docs build readmes molecule bench clean

help:            ## what there is
	@sed -n 's/^\([a-z]*\): *\([a-z ]*\)## \(.*\)/  make \1\t\3/p' $(MAKEFILE_LIST)

venv:            ## the tools, in .venv
	@$(PYTHON) tests/tools/bootstrap.py

demo: venv       ## two systemd hosts on this machine serving a small model with real vLLM
	@$(RUN) tests/tools/demo.py

lab: venv        ## only the two hosts, without a deployment
	@$(RUN) molecule/lab/lab.py up

down: venv       ## the two hosts off; downloads are kept
	@$(RUN) molecule/lab/lab.py down
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" molecule reset --all > /dev/null 2>&1 || true

test: venv       ## every check there is
	@$(CHECK) all

lint sanity units docs build molecule: venv
	@$(CHECK) $@

bench: venv      ## the benchmarks: tables, and values in .cache/benchmarks.json
	@$(RUN) tests/benchmarks/run.py

readmes: venv    ## write the roles' READMEs from their argument specs
	@$(RUN) tests/tools/readmes.py --write

clean:           ## remove the hosts and all that was made here; downloads are kept
	@if [ -x $(RUN) ]; then $(RUN) molecule/lab/lab.py clean; else $(PYTHON) molecule/lab/lab.py clean; fi
	@rm -rf .cache .venv .venv-oldest .ansible .pytest_cache .ruff_cache inventory/lab tests/output
