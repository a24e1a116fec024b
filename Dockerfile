# docker build -t forebay .
# docker run --rm -it forebay                                     # the demo
# docker run --rm -it -v "$PWD:/models:ro" forebay run /models/MODEL.gguf
# docker run --rm -it -v forebay:/home/forebay/.local/share/forebay forebay pull OWNER/REPO
# docker run --rm -v "$PWD:/models:ro" -p 127.0.0.1:8080:8080 forebay serve /models/MODEL.gguf --host 0.0.0.0 \
#     --api-key-file /models/keys
# docker run --rm -v forebay-state:/home/forebay/.local/state/forebay -v "$PWD:/models" forebay doctor /models
# The machine profile is in the volume forebay-state: mount it in the other commands, too, so that they find it.
# Inside the container, the server listens on all addresses, so it wants keys: one on each line of the file. `-p` decides which
# clients reach it from outside; this one lets in this machine only.
# With a GPU, `--gpus all` brings the driver. The image needs nothing else from CUDA.
#
# Reads past the page cache use io_uring, which Docker's default seccomp profile forbids. forebay then reads with a pool of
# threads. `--security-opt seccomp=unconfined` allows io_uring.
FROM rust:1.95-slim-bookworm AS build
WORKDIR /source
COPY . .
# `--no-default-features` builds without CUDA.
ARG FEATURES=""
RUN cargo build --locked --profile dist -p forebay $FEATURES

FROM debian:bookworm-slim
# `forebay pull` checks certificates against those of the system.
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 forebay
COPY --from=build /source/target/dist/forebay /usr/local/bin/forebay
COPY --from=build /source/models/*.gguf /usr/local/share/forebay/models/
# What the NVIDIA container toolkit gives the container: the driver for computing, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER forebay
WORKDIR /home/forebay
# A new volume that is mounted here belongs to the user, too.
RUN mkdir -p .local/share/forebay .local/state/forebay
ENTRYPOINT ["forebay"]
CMD ["--help"]
