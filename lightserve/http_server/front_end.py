"""What the routes of one HTTP process share."""

from dataclasses import dataclass, field

from lightserve.http_server.body import Bodies
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.prompts import Prompts
from lightserve.http_server.status import Status
from lightserve.http_server.streams import Streams


@dataclass(frozen=True)
class FrontEnd:
    """One HTTP process's state.

    Attributes:
        model_name: The served model's id in the OpenAI API.
        created: When the server started, Unix time; the model's ``created``.
    """

    model_name: str
    created: int
    status: Status
    streams: Streams
    prompts: Prompts
    metrics: Metrics
    bodies: Bodies = field(default_factory=Bodies)
