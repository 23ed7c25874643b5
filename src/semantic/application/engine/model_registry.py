"""Which model is served, how it is, and which names stand for it."""

import time
from collections.abc import Sequence

from semantic.application.engine.device_thread import DeviceThread
from semantic.domain.model_names import require_served
from semantic.ports.inbound import ModelStatus


class ModelRegistry:
    """`ModelManagementPort` over the device's one model. Safe on any thread."""

    def __init__(
        self,
        device: DeviceThread,
        model_id: str,
        backend_name: str,
        aliases: Sequence[str] = (),
    ) -> None:
        self._device = device
        self._model_id = model_id
        self._backend_name = backend_name
        self._aliases = tuple(aliases)
        self._created_at = time.time()

    def models(self) -> tuple[ModelStatus, ...]:
        """The model this server serves or is loading."""
        model = self._device.model
        return (
            ModelStatus(
                id=self._model_id,
                backend=self._backend_name,
                state=self._device.state,
                detail=self._device.detail,
                max_context=model.backend.spec.max_context if model else 0,
                created_at=self._created_at,
                compute=model.backend.traits.compute if model else None,
            ),
        )

    def find(self, name: str) -> ModelStatus:
        """The model that a name stands for."""
        require_served(name, self._model_id, self._aliases)
        return self.models()[0]
