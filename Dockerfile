# One image for every stage and for training:
#
#   docker build -t latentpress .                                                       # CUDA (torch's wheels bring it)
#   docker build -t latentpress:cpu --build-arg TORCH="torch==2.13.0 --index-url ADDRESS" .     # CPU
#   docker build -t latentpress:media --build-arg TORCH= --build-arg EXTRAS=media .             # discover and bucket
#
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" -v "$HOME/.cache/huggingface:/home/latentpress/.cache/huggingface" \
#       --user "$(id -u):$(id -g)" latentpress run --config pipeline.yaml
#
# compose.yaml has the same, and docs/install.md more. ADDRESS: what pytorch.org names for the wheels of the CPU, or of another CUDA.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG TORCH=torch==2.13.0
# All of pyproject.toml but those of the demo and of development.
ARG EXTRAS=media,encode,train,report,ui,quant,optimizers,notify,wandb,s3,gcs,http,huggingface,webdataset,heif,scenes,faces,features,decord,ray

# torch.compile (train.compile) calls a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/latentpress
RUN python3 -m venv /opt/venv && if [ -n "${TORCH}" ]; then /opt/venv/bin/pip install --no-cache-dir ${TORCH}; fi
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY latentpress latentpress
COPY schemas schemas
COPY cache cache
COPY stages stages
COPY trainer trainer
COPY examples/recipes examples/recipes
RUN /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && useradd --uid 1000 --create-home latentpress && install -d -m 777 /home/latentpress /home/latentpress/.cache \
    && install -d -o latentpress /work
# A user of `--user` has no entry in /etc/passwd; libraries ask for the name and the home folder.
ENV PATH=/opt/venv/bin:$PATH HOME=/home/latentpress USER=latentpress

USER latentpress
WORKDIR /work
ENTRYPOINT ["latentpress"]
CMD ["--help"]
