# The commands of the project; `make` lists them.

PYTHON ?= python3
VENV   ?= .venv
ONLY   ?=
SLOW   ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

# pip would compile 20,000 files one by one (--no-compile). Python compiles those that are imported, and keeps them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help cram test test-slow test-gpu book export readme pages site-check package-check docs clean needs

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

cram: $(VENV)/.run  ## install, then pretrain a small language model and report on it
	$(BIN)/cram run

test: $(VENV)/.dev  ## what every change has to pass
	@$(BIN)/python tools/check.py

test-slow: $(VENV)/.dev  ## with what takes long (cells and tests marked slow)
	@$(BIN)/python tools/check.py slow

test-gpu: $(VENV)/.dev  ## with what needs a GPU (cells and tests marked gpu; without one, tests are skipped)
	@$(BIN)/python tools/check.py gpu

book: export  ## execute the notebooks in place (ONLY=05_model: that one; SLOW=1: with the cells marked slow)
	$(BIN)/python tools/book.py run $(if $(SLOW),--slow) $(ONLY)

export: $(VENV)/.dev  ## write the package from the notebooks, and clean them
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean

readme: $(VENV)/.dev  ## write README.md from nbs/index.ipynb
	$(BIN)/python tools/book.py readme

pages: $(VENV)/.dev  ## build and check the site in _docs_preview/
	$(BIN)/python tools/pages.py _docs_preview

site-check: $(VENV)/.dev  ## look at every page in a browser (Quarto's pages where Quarto is installed, else the preview)
	@if command -v quarto >/dev/null; then $(MAKE) docs; \
	else $(MAKE) pages && $(BIN)/python tools/site_check.py _docs_preview _site_check; fi

package-check: $(VENV)/.dev  ## install the wheel into an empty environment, use it, and each extra alone (minutes)
	$(BIN)/python tools/package_check.py

docs: $(VENV)/.dev  ## build the site in _docs/ with Quarto, and look at it; a warning is an error
	$(BIN)/python tools/book.py docs
	$(BIN)/python tools/site_check.py _docs _site_check

clean:  ## remove what was built, .venv too; runs/ stays
	rm -rf $(VENV) _proc _docs _docs_preview _site_check build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Two stamps, so that nothing is installed twice: the package, and the package with the tools of its authors.
$(VENV)/.run: EXTRA :=
$(VENV)/.dev: EXTRA := [dev]
$(VENV)/.run $(VENV)/.dev: settings.ini setup.py constraints.txt | needs
	@echo "installing into $(VENV): minutes, the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) ".$(EXTRA)"
	@touch $(VENV)/.run $@

needs:
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or later is needed, as python3 or as make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is needed (on Debian: apt install python3-venv)"; exit 1; }
	@command -v git >/dev/null || { echo "git is needed"; exit 1; }
