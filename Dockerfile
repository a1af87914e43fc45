# The steps of the Makefile in a container:
#   docker build --tag penstock .
#   docker run --interactive --tty --network host penstock            make demo, then its page on port 8000
#   docker run --volume "$PWD:/data" penstock .venv/bin/penstock --help
FROM python:3.11-slim

RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /penstock
COPY . .
RUN make setup && rm -rf /root/.cache

CMD ["make", "demo"]
