"""The HTTP edge: translate, call the service, translate."""

from coordinator.api.app import create_app

__all__ = ["create_app"]
