# Builds two images:
#   docker build --target coordinator --build-arg TORCH_INDEX=… --tag distrans-coordinator:0.1.0 .
#   docker build --target agent --tag distrans-agent:0.1.0 .
# TORCH_INDEX is the URL of a package index with PyTorch wheels. The coordinator uses only the CPU, so CPU wheels make its
# image much smaller. The default wheels, which the agent uses, include CUDA and need only the host's driver.
ARG TORCH_INDEX=""

FROM python:3.11.13-slim-bookworm AS build
ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Without pip, the environment copied into the images can run the programs but install nothing.
RUN python -m venv --without-pip /opt/distrans
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY distrans.py distrans.py
COPY shared shared
COPY server server
COPY client_agent client_agent
COPY lab lab
COPY migrations migrations
COPY paper paper
RUN python -m pip --python /opt/distrans/bin/python install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[s3]"

FROM python:3.11.13-slim-bookworm AS base
RUN python -m pip uninstall --yes pip setuptools wheel \
    && groupadd --gid 10001 distrans \
    && useradd --uid 10001 --gid distrans --no-create-home --home-dir /var/lib/distrans --shell /usr/sbin/nologin distrans \
    && install --directory --owner=distrans --group=distrans --mode=0700 /var/lib/distrans
COPY --from=build /opt/distrans /opt/distrans
ENV PATH=/opt/distrans/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/distrans
VOLUME /var/lib/distrans

FROM base AS coordinator
ENV DISTRANS_DATA_DIR=/var/lib/distrans
EXPOSE 8400
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8400/readyz', timeout=4)"]
ENTRYPOINT ["distrans-server"]
CMD ["serve", "--host", "0.0.0.0", "--log-format", "json"]

FROM base AS agent
ENV DISTRANS_AGENT_STATE=/var/lib/distrans NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8500
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from client_agent.web.health import check; check(8500)"]
ENTRYPOINT ["distrans-agent"]
# Listens on all interfaces of the container, which requires DISTRANS_PREDICT_TOKEN_FILE or DISTRANS_PREDICT_TOKEN.
CMD ["run", "--host", "0.0.0.0"]
