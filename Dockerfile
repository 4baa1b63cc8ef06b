# docker build --target cpu  -t tiermoe:0.1.0-cpu .      0.4 GB of packages to fetch; the CPU stands in for a GPU
# docker build --target cuda -t tiermoe:0.1.0-cuda .     2.9 GB; the driver is the host's (docs/gpu.md), by NVIDIA's container toolkit
# Both hold the same Python, Ray and tiermoe, so one cluster may have nodes of both (configs/k8s). tests/install runs these steps.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY . /src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:${PYTHON}-slim-bookworm AS base
COPY constraints.txt /constraints.txt
# not root; a fixed number, so that volumes can be made to belong to it
RUN useradd --create-home --uid 1000 tiermoe
WORKDIR /home/tiermoe
EXPOSE 8000
ENTRYPOINT ["tiermoe"]

FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} -c /constraints.txt "$(ls /wheels/tiermoe-*.whl)"
USER tiermoe

FROM base AS cuda
# Triton compiles the launchers of its kernels at start: a C compiler, which tiermoe itself does not need
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir -c /constraints.txt "$(ls /wheels/tiermoe-*.whl)[gpu]"
USER tiermoe
