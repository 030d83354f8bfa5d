# schedlab without installing anything:
#   docker build -t schedlab . && docker run --rm -v "$PWD/out:/out" schedlab run quickstart -o /out/quickstart
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /schedlab
COPY . .
# The experiment that README begins with, run once: an image that cannot run it is not built.
RUN make demo PYTHON=python3 && rm -rf runs /root/.cache
ENV PATH="/schedlab/.venv/bin:$PATH" MPLCONFIGDIR=/schedlab/.matplotlib
ENTRYPOINT ["schedlab"]
CMD ["--help"]
