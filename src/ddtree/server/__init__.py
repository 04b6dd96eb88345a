"""An OpenAI-compatible server over the engine.

Two threads: the event loop speaks HTTP (`app`, `gate`, `answer_response`), the engine's thread owns the engine and runs
rounds (`engine_thread`). Orders go one way through a queue, what was written comes back as calls into the loop (`job`,
`service`).
"""

from ddtree.server.app import create_app
from ddtree.server.run import serve
from ddtree.server.settings import ApiKeys, ServerSettings, api_key, read_api_keys

__all__ = ["ApiKeys", "ServerSettings", "api_key", "create_app", "read_api_keys", "serve"]
