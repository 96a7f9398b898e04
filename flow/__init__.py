"""The durable part: threads, approvals, payments, and the flows themselves. It knows neither Slack nor HTTP."""

import os

# Before LangGraph is imported anywhere: a variable that happens to be set would send every claim to LangSmith, and
# start threads that no fork survives.
for _name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING", "LANGCHAIN_TRACING_V2"):
    os.environ[_name] = "false"
