# syntax=docker/dockerfile:1
# Serving images for CPUs and for GPUs:
#   docker build --tag penstock .
#   docker build --tag penstock:cuda --build-arg VARIANT=cuda .
# docs/how-to/containers.md has the rest. Python, torch and all packages are pinned by hash; deploy/images holds the locks.
ARG PYTHON=python:3.11-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba

FROM ${PYTHON} AS build
ARG VARIANT=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY deploy/images/ locks/
RUN python -m venv --without-pip /opt/penstock \
    && pip --python /opt/penstock/bin/python install --no-deps --require-hashes --requirement locks/${VARIANT}.lock
# What compiles the request path of the server. The base image's digest fixes the release of Debian.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && pip --python /opt/penstock/bin/python install --no-deps --require-hashes --requirement locks/build.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY penstock/ penstock/
# setuptools is in the lock: nothing is downloaded here. A server needs neither the test programs of torch nor its headers.
RUN PENSTOCK_COMPILE=1 pip --python /opt/penstock/bin/python install --no-deps --no-build-isolation --no-index . \
    && pip --python /opt/penstock/bin/python uninstall --yes cython \
    && rm -r /opt/penstock/lib/python3.11/site-packages/torch/include \
        /opt/penstock/lib/python3.11/site-packages/torch/share \
        /opt/penstock/lib/python3.11/site-packages/torch/test \
    && find /opt/penstock/lib/python3.11/site-packages/torch/bin -type f ! -name torch_shm_manager -delete
# The software bill of materials of what was installed, in CycloneDX.
RUN python -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --require-hashes --requirement locks/sbom.lock \
    && /opt/sbom/bin/cyclonedx-py environment /opt/penstock/bin/python \
        --output-format JSON --output-file /opt/penstock/sbom.cdx.json

FROM ${PYTHON}
ARG VARIANT=cpu
# Triton compiles the calls of its kernels at their first use. The base image's digest fixes the release of Debian.
# hadolint ignore=DL3008
RUN if [ "${VARIANT}" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN groupadd --system --gid 10001 penstock \
    && useradd --system --uid 10001 --gid penstock --no-create-home --home-dir /nonexistent penstock \
    && install --directory --owner penstock --group penstock /cache /models
COPY --from=build /opt/penstock /opt/penstock
COPY deploy/images/health.py /opt/penstock/health.py
# Exported networks are kept in /cache: mount a volume there, or each new container exports them again.
ENV PATH=/opt/penstock/bin:$PATH \
    PENSTOCK_CACHE=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /models
VOLUME /cache
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# The first start of a network exports it, which takes minutes for a large one; the port is open meanwhile.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=2s --retries=3 \
    CMD ["python", "/opt/penstock/health.py"]
ENTRYPOINT ["penstock"]
CMD ["serve", "--models", "/models", "--host", "0.0.0.0", "--port", "8000", "--grpc-port", "8001"]
