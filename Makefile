# make install | test | ranks | slow | lint | docs | bench
.PHONY: install test ranks slow lint docs bench

install:
	python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'

test:
	.venv/bin/pytest

ranks:
	.venv/bin/pytest -m 'ranks and not slow'

slow:
	.venv/bin/pytest -m slow

lint:
	.venv/bin/ruff check . && .venv/bin/mypy

docs:
	.venv/bin/mkdocs build --strict

bench:
	.venv/bin/python -m benchmarks
