# syntax=docker/dockerfile:1.7

# pip's cache is a mount, which leaves nothing in an image
# hadolint global ignore=DL3042

# Four images, a target each; docs/stack.md says what runs in which.
#   docker build --target client     --tag pagemill-client .        the client and its commands
#   docker build --target gateway    --tag pagemill-gateway .       gateway, bulk, Celery, exporter: no torch
#   docker build --target worker-cpu --tag pagemill-worker-cpu .
#   docker build --target worker-gpu --tag pagemill-worker-gpu .
# Behind a mirror: --build-arg PIP_INDEX_URL=... and, for worker-cpu, --build-arg TORCH_INDEX=...

# Python 3.11 is what the tests run with
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm


FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN groupadd --gid 10001 pagemill \
    && useradd --uid 10001 --gid 10001 --create-home pagemill
WORKDIR /app


# all that pip needs to know of us: the code itself comes later, so that a change of it installs nothing again
FROM base AS build
ARG PIP_INDEX_URL
ENV PIP_CACHE_DIR=/var/cache/pip
RUN python -m venv /opt/venv
COPY pyproject.toml constraints.txt README.md ./
COPY pagemill/__init__.py pagemill/


FROM build AS build-client
COPY pagemill pagemill
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --constraint constraints.txt .


FROM build AS build-gateway
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --constraint constraints.txt --editable '.[gateway,bulk,celery,otel]'


FROM build AS build-worker-cpu
# torch without CUDA, which is a tenth of the size; an empty value takes what pip's own index has
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    --editable '.[worker,structured,otel]'


FROM build AS build-worker-gpu
COPY deploy/docker/constraints-gpu.txt deploy/docker/
# where both name a package, the GPU's version holds
RUN --mount=type=cache,target=/var/cache/pip \
    sed 's/^\(.*==\).*/^\1/' deploy/docker/constraints-gpu.txt > gpu-names.txt \
    && grep -vf gpu-names.txt constraints.txt > constraints-other.txt \
    && pip install --constraint constraints-other.txt --constraint deploy/docker/constraints-gpu.txt \
    --editable '.[worker,structured,otel]'


FROM base AS client
COPY --from=build-client /opt/venv /opt/venv
USER 10001:10001
ENTRYPOINT ["pagemill"]
CMD ["--help"]


# an editable install reads the code in /app
FROM base AS gateway
# folders that volumes are mounted at: a new volume takes the owner over
RUN install --directory --owner pagemill --group pagemill --mode 0750 /secrets /s3 /state /scratch
COPY --from=build-gateway /opt/venv /opt/venv
COPY pyproject.toml ./
COPY pagemill pagemill
COPY producers producers
# for its exporter, which needs no engine
COPY worker worker
COPY deploy/compose deploy/compose
RUN python -m compileall -q /app
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=3)"]
CMD ["pagemill", "gateway"]


FROM base AS worker
ENV PAGEMILL_CACHE=/cache \
    PAGEMILL_METRICS_HOST=0.0.0.0 \
    PAGEMILL_METRICS_PORT=9464 \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    OMP_WAIT_POLICY=PASSIVE
RUN install --directory --owner pagemill --group pagemill /cache
COPY pyproject.toml ./
COPY pagemill pagemill
COPY kernels kernels
COPY engine engine
COPY worker worker
RUN python -m compileall -q /app
VOLUME /cache
EXPOSE 9464
# while a model is loaded a worker is not ready yet, and /readyz says so
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:9464/readyz', timeout=3)"]
CMD ["pagemill", "worker"]


FROM worker AS worker-cpu
COPY --from=build-worker-cpu /opt/venv /opt/venv
ENV PAGEMILL_DEVICE=cpu
USER 10001:10001


FROM worker AS worker-gpu
# Triton compiles a launcher for its kernels when they are first used
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-worker-gpu /opt/venv /opt/venv
# one that finds no GPU ends with a message, and does not compute on the CPU
ENV PAGEMILL_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
