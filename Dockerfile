# Three images from one file: `service` (api, ticker, migrate), `worker-cpu` (the tiny worker), `worker-gpu`.
# PIP_ARGS goes to pip: an index, or one that has torch's CPU build for worker-cpu.
ARG PYTHON_TAG=3.11.14-slim-bookworm

FROM python:${PYTHON_TAG} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/venv/bin:$PATH HOME=/tmp
RUN python -m venv /opt/venv \
 && groupadd --gid 10001 farm && useradd --uid 10001 --gid farm --no-create-home --shell /usr/sbin/nologin farm \
 && install -d -o farm -g farm /state
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE profiles.yaml ./
COPY kernels kernels
COPY magi2 magi2
COPY farm farm
COPY api api
COPY worker worker
COPY migrations migrations
ARG PIP_ARGS=

FROM base AS service
# Editable: profiles.yaml and the migrations are read beside the code.
RUN pip install ${PIP_ARGS} -c constraints.txt -e ".[otel]"
USER 10001:10001
CMD ["magi2-farm", "api"]

FROM base AS worker-cpu
RUN pip install ${PIP_ARGS} -c constraints.txt -e ".[engine,cache,otel]" \
 && python -m magi2 tiny-checkpoint /opt/tiny-checkpoint
USER 10001:10001
CMD ["magi2-farm", "worker", "--profile", "tiny-cpu"]

FROM base AS worker-gpu
# Triton compiles its launchers with a C compiler when a kernel first runs.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
 && pip install ${PIP_ARGS} -c constraints.txt -e ".[engine,cache,gpu,otel]"
USER 10001:10001
CMD ["magi2-farm", "worker", "--profile", "sp4"]
