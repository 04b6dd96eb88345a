# The server, for the CPU and for NVIDIA GPUs:
#
#   docker build --target cpu -t ddtree:cpu .
#   docker build --target cuda -t ddtree:cuda .
#   docker run -p 8000:8000 -e DDTREE_API_KEY=... -v /models:/models:ro ddtree:cpu --model /models/target --draft /models/drafter
#   docker run --gpus all ...  ddtree:cuda --model ...
#
# Arguments go to `ddtree serve`. docs/server.md says more.

ARG BASE=debian:bookworm-slim

# What both images run on: Debian's own Python 3.11, and an init process that hands signals on.
FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# torch is installed before the sources come, so that a change of them does not fetch it again.
FROM python AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/ddtree/bin:$PATH
RUN python3 -m venv /opt/ddtree

FROM build AS build-cpu
# PyTorch's own index has builds without CUDA; empty takes pip's configured index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch>=2.11"
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install "/source[server]"

FROM build AS build-cuda
# Empty takes pip's configured index, whose builds are for the newest CUDA; drivers that are older want another one, such
# as https://download.pytorch.org/whl/cu126.
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch>=2.11"
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install "/source[server]"

FROM python AS runtime
RUN useradd --uid 10001 --create-home ddtree && install -d -o ddtree -g ddtree /home/ddtree/.cache
ENV PATH=/opt/ddtree/bin:$PATH PYTHONUNBUFFERED=1 DDTREE_PORT=8000
# Measured costs of rounds, compiled kernels, the demo's model: worth a named volume.
VOLUME /home/ddtree/.cache
WORKDIR /home/ddtree
EXPOSE 8000
STOPSIGNAL SIGTERM
# Healthy is ready: a token was generated. Loading a large model takes a while, which is no fault yet.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['DDTREE_PORT']}/ready\", timeout=4)"]
# 0.0.0.0 is the container's own address; the server wants a key there, or --insecure.
ENTRYPOINT ["tini", "--", "sh", "-c", "exec ddtree serve --host 0.0.0.0 --port \"$DDTREE_PORT\" \"$@\"", "serve"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/ddtree /opt/ddtree
USER 10001:10001

# The driver comes from the host. Triton compiles its launchers with a C compiler when a kernel is first used.
FROM runtime AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/ddtree /opt/ddtree
USER 10001:10001
