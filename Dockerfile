# Builds an image of the program and its demo model. docs/install.md says how to use it.
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
