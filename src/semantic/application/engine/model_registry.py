"""Which model is served, and how it is."""

import time

from semantic.application.engine.device_thread import DeviceThread
from semantic.ports.inbound import ModelStatus


class ModelRegistry:
    """`ModelManagementPort` over the device's one model. Safe on any thread."""

    def __init__(self, device: DeviceThread, model_id: str, backend_name: str) -> None:
        self._device = device
        self._model_id = model_id
        self._backend_name = backend_name
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
