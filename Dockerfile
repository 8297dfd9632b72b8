# docker build -t autoparallel . && docker run --rm autoparallel
# Runs the demo; docker run --rm -v "$PWD:/work" autoparallel autoparallel launch --ranks 4 -- python train.py: a script.
FROM python:3.11-slim
COPY pyproject.toml README.md LICENSE /src/
COPY autoparallel /src/autoparallel
COPY cost_models /src/cost_models
COPY benchmarks /src/benchmarks
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu '/src[models]'
WORKDIR /work
CMD ["autoparallel", "demo"]
