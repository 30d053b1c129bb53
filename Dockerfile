# An environment with modular_kernel whose default command is the demo.
#
#     docker build --target cpu -t modular-kernel:cpu .
#     docker run --rm modular-kernel:cpu
#
#     docker build --target cuda -t modular-kernel:cuda .
#     docker run --rm --gpus all modular-kernel:cuda
#
# Arguments follow `mk`: `docker run --rm modular-kernel:cpu check --model deepseek-v3 ...`.
#
# The steps of both targets were run in a root directory of Debian trixie with Python 3.11, without a
# container engine: in that of cpu the demo passed as the user mk; that of cuda was installed, but no
# GPU was there to run its demo. Neither target needs a CUDA base image: torch's wheels have the CUDA
# libraries, and the host's driver comes with --gpus.

FROM python:3.11-slim-trixie AS base
# A C compiler: Triton builds its launcher, and recorded launches are replayed by a small C library.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# Kernels are interpreted, so that the demo also runs the Triton parts.
FROM base AS cpu
COPY constraints-cpu.txt ./
# torch before the sources, which change more often.
RUN torch="$(grep '^torch==' constraints-cpu.txt)" \
    && pip install --index-url https://download.pytorch.org/whl/cpu "$torch"
COPY . .
RUN pip install -c constraints-cpu.txt '.[transformers,interpreter]'
RUN useradd --create-home mk
USER mk
WORKDIR /home/mk
ENTRYPOINT ["mk"]
CMD ["demo"]

# pip's torch for Linux is built with CUDA. Kernels are compiled for the GPU that the container sees.
FROM base AS cuda
COPY constraints-cpu.txt ./
RUN torch="$(grep '^torch==' constraints-cpu.txt)" && pip install "$torch"
COPY . .
RUN pip install '.[transformers]'
RUN useradd --create-home mk
USER mk
WORKDIR /home/mk
ENTRYPOINT ["mk"]
CMD ["demo"]
